"""On the page of solvers, what the header of each says, and its options.

Nothing is written twice: names come from `TABLE`, words from that docstring. A new
solver has its part with its line in `TABLE`.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from benchmarks.solver_table import header_of
from remat.solver import TABLE, solver_class

ROOT = Path(__file__).parents[2]
PAGE = "solvers.md"

_LABELS = ("Also called", "Paper", "Source", "Solves", "Family", "Optimal", "Cost", "Shortcomings")
_LABEL = re.compile(
    rf"(?:^|(?<=[.]))\s*\b({'|'.join(_LABELS)})(:| (?=only|up|where))", re.MULTILINE
)
_LINK = re.compile(r"(?<![(<])https?://[^\s,;)]+[^\s,;).]")


_ROW = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page: add the parts, to which the rows of the table link."""
    if page.file.src_uri != PAGE:
        return markdown
    linked = _ROW.sub(lambda found: f"| [`{found[1]}`](#{found[1]}) |", markdown)
    return "\n\n".join([linked, "## Each solver", *map(solver_part, TABLE)])


def solver_part(name: str) -> str:
    """The part of one solver in Markdown."""
    made = solver_class(name)
    title, _, header = header_of(name).partition("\n")
    path = Path(inspect.getfile(made)).relative_to(ROOT).as_posix()
    return "\n\n".join(
        [
            f"### {name}",
            f"**{title.strip()}**",
            labelled(header.strip()),
            f"File: `{path}`.",
            f"::: {made.__module__}.{made.__qualname__}\n    options:\n      members: false\n"
            "      heading_level: 4\n      show_root_toc_entry: false\n"
            "      show_docstring_description: false\n",
        ]
    )


def labelled(header: str) -> str:
    """The header with each of its labels, such as ``Solves:``, opening a paragraph in bold."""
    text = _LABEL.sub(lambda found: f"\n\n**{found[1]}**{found[2]}", header)
    return _LINK.sub(lambda found: f"<{found[0]}>", text).strip()
