"""A page for each solver: what its header says, and its options.

Nothing is written twice: names come from `TABLE`, words from that docstring. A new
solver has its page with its line in `TABLE`.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from remat.solver import TABLE, solver_class
from remat.solver.table import header_of

ROOT = Path(__file__).parents[2]

_LABELS = ("Also called", "Paper", "Source", "Solves", "Family", "Optimal", "Cost", "Shortcomings")
_LABEL = re.compile(
    rf"(?:^|(?<=[.]))\s*\b({'|'.join(_LABELS)})(:| (?=only|up|where))", re.MULTILINE
)
_LINK = re.compile(r"(?<![(<])https?://[^\s,;)]+[^\s,;).]")


def on_config(config: Any) -> Any:
    """Called by mkdocs before anything is read: put the pages into the navigation."""
    for section in config.nav:
        if "Solvers" in section:
            section["Solvers"] += [f"solvers/{name}.md" for name in TABLE]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs when it knows the pages that are written by hand."""
    for name in TABLE:
        page = File.generated(config, f"solvers/{name}.md", content=solver_page(name))
        files.append(page)
    return files


def solver_page(name: str) -> str:
    """The page in Markdown."""
    made = solver_class(name)
    title, _, header = header_of(name).partition("\n")
    path = Path(inspect.getfile(made)).relative_to(ROOT).as_posix()
    return "\n\n".join(
        [
            f"# {name}",
            f"**{title.strip()}**",
            labelled(header.strip()),
            f"The file: [`{path}`](../../{path}).",
            f"```sh\nremat run MODEL --budget 60% --solver {name}\n```",
            f'```python\nresult = remat.solve(graph, "60%", solver="{name}")\n```',
            "[Which solver when, and how they compare](../solvers.md)",
            "## Options",
            f"::: {made.__module__}.{made.__qualname__}\n    options:\n      members: false\n"
            "      show_docstring_description: false\n",
        ]
    )


def labelled(header: str) -> str:
    """The header with each of its labels, such as ``Solves:``, opening a paragraph in bold."""
    text = _LABEL.sub(lambda found: f"\n\n**{found[1]}**{found[2]}", header)
    return _LINK.sub(lambda found: f"<{found[0]}>", text).strip()
