"""How graphs, schedules, results and fronts look in a notebook: small tables in HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

NUMBER = ' style="text-align:right"'
TEXT = ' style="text-align:left"'


def figures_html(title: str, figures: Sequence[tuple[str, str]]) -> str:
    """A title, and one row a figure; figures without text are left out."""
    rows = "".join(
        f'<tr><th scope="row"{TEXT}>{escape(name)}</th><td{TEXT}>{escape(text)}</td></tr>'
        for name, text in figures
        if text
    )
    return f"<table><caption><b>{escape(title)}</b></caption><tbody>{rows}</tbody></table>"


def table_html(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A title, headers, and rows whose first cell names them; the other cells are numbers."""
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    return (
        f"<table><caption><b>{escape(title)}</b></caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _cells(row: Sequence[str]) -> str:
    name, *numbers = row
    cells = "".join(f"<td{NUMBER}>{escape(number)}</td>" for number in numbers)
    return f'<th scope="row"{TEXT}>{escape(name)}</th>{cells}'
