"""Turns the sections of our docstrings into Markdown lists, as an extension of griffe.

We write numpy's sections with a name and its meaning on one line, and several names at a time
where they belong together (`keep, recompute : globs`). A numpy parser would take what follows the
colon for a type.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(?P<title>[A-Z][A-Za-z ]+)\n-{3,}\n", re.MULTILINE)
_NEXT = re.compile(r"(?<=\.)\s+(\*{0,2}[a-zA-Z]\w*(?:, \*{0,2}\w+)*) : ")
"""Another entry on the line of one before it."""
_ENTRY = re.compile(r"^(?P<names>\S.*?)(?: : |:\s*$)(?P<text>.*)$")


class HouseSections(griffe.Extension):
    """Rewrites each docstring when griffe has read its object."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """The docstring with each underlined title in bold, and the entries below it as a list."""
    text = inspect.cleandoc(docstring)
    titles = list(_SECTION.finditer(text))
    if not titles:
        return text
    parts = [text[: titles[0].start()].rstrip()]
    ends = [title.start() for title in titles[1:]] + [len(text)]
    for title, end in zip(titles, ends, strict=True):
        parts.append(f"**{title['title']}**")
        parts.append(_listed(text[title.end() : end].strip("\n")))
    return "\n\n".join(part for part in parts if part)


def _listed(section: str) -> str:
    """Entries as a list; a section without entries as it is."""
    lines: list[str] = []
    for line in section.splitlines():
        entry = None if line.startswith(" ") else _ENTRY.match(line)
        if entry:
            lines.append(f"- `{entry['names']}`: {entry['text']}".rstrip())
        elif lines and line.strip():
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
    return _NEXT.sub(lambda found: f"\n- `{found[1]}`: ", "\n".join(lines))
