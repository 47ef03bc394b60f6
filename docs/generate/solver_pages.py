"""A page for each solver: what the header of its file says, and its options.

Nothing is written twice: names come from `TABLE`, words from the file's own docstring. A new
solver has its page with its line in `TABLE`.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from mkdocs.structure.files import File, Files

from remat.solver import TABLE, solver_class

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
    module = sys.modules[made.__module__]
    title, _, header = (module.__doc__ or "").partition("\n")
    path = f"{made.__module__.removeprefix('remat.').replace('.', '/')}.py"
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
            f"::: {made.__module__}.{made.__qualname__}\n    options:\n      members: false\n",
        ]
    )


def labelled(header: str) -> str:
    """The header with each of its labels, such as ``Solves:``, opening a paragraph in bold."""
    text = _LABEL.sub(lambda found: f"\n\n**{found[1]}**{found[2]}", header)
    return _LINK.sub(lambda found: f"<{found[0]}>", text).strip()
