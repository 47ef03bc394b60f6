"""The page of the Python API: every public name of `remat`, its functions first.

Like all pages that the code can say, it is made when the site is built and not committed. So no
page says other than the code.
"""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

import remat

_HEAD = """# Python

Everything here is `remat.NAME`. `import remat` imports no torch; what needs it imports it when it
is first used. Sizes are in bytes and times in microseconds, as the names of the fields say;
budgets may also be texts, such as `"8GiB"`, `"60%"`, `"auto"` and `"min"`.
"""


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs when it knows the pages that are written by hand."""
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def api_page() -> str:
    """The page in Markdown; mkdocstrings fills it in."""
    functions = [name for name in remat.__all__ if name[0].islower()]
    classes = [name for name in remat.__all__ if name[0].isupper()]
    parts = [_HEAD, "## Functions", *map(_entry, functions), "## Classes", *map(_entry, classes)]
    return "\n\n".join(parts)


def _entry(name: str) -> str:
    return f"::: remat.{name}"
