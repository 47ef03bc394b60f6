"""The page of the command line, as typer itself writes it from the verbs.

It is made when the site is built, so it cannot say other than `remat --help`.
"""

from __future__ import annotations

import html
import subprocess
import sys
from typing import Any

from mkdocs.structure.files import File, Files

_COMMAND = (
    "-m",
    "typer",
    "--app",
    "app",
    "remat.cli.main",
    "utils",
    "docs",
    "--name",
    "remat",
    "--title",
    "Command line",
)
_EXIT_CODES = """## Exit codes

| code | means |
|---|---|
| 0 | done |
| 2 | refused: wrong usage, or a model, batch or file that cannot be planned for |
| 3 | nothing fits the budget; the message names the least budget known to |
| 4 | the plan was made, and its check against eager failed |
"""


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs when it knows the pages that are written by hand."""
    files.append(File.generated(config, "command_line.md", content=command_page()))
    return files


def command_page() -> str:
    """The page in Markdown."""
    done = subprocess.run([sys.executable, *_COMMAND], capture_output=True, text=True, check=True)
    return f"{html.unescape(done.stdout)}\n{_EXIT_CODES}"
