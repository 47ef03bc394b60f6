"""Names as labels of a picture, whatever they hold."""

from __future__ import annotations


def literal(name: str) -> str:
    """The name for matplotlib, which else reads what is between two dollars as a formula."""
    return name.replace("$", r"\$")
