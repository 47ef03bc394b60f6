"""The screen of `compare`: a row a solver, a column a budget; as many tables as the width asks."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from remat.formats import bytes_text, percent_text, time_text
from remat.job.screen import plain_table
from remat.questions.compare import THIS_PLAN, Compared, Comparison

NAME_COLUMNS = 24
CELL_COLUMNS = 13
"""Columns that a solver's name and a cell take."""


def comparison_screen(found: Comparison, width: int = 100) -> RenderableType:
    """Overheads by solver and budget; the best at each budget is marked."""
    most = max((width - NAME_COLUMNS) // CELL_COLUMNS, 1)
    parts: list[RenderableType] = [_headline(found)]
    count = len(found.bounds)
    for first in range(0, count, most):
        parts += [Text(), _table(found, range(first, min(first + most, count)))]
    refused = [row for row in found.rows if row.refused]
    parts += [Text(), Text("* the fastest found at this budget; - finds nothing that fits")]
    parts += [Text(f"{row.solver}: {row.refused}", style="dim") for row in refused]
    return Group(*parts)


def _headline(found: Comparison) -> Text:
    return Text.assemble(
        (found.model, "bold"),
        f", {found.prices} on {found.device}: unmodified {bytes_text(found.unmodified_bytes)}, "
        f"{time_text(found.base_us)} a step; overheads of each solver's plan",
    )


def _table(found: Comparison, columns: range) -> Table:
    table = plain_table("budget", *(bytes_text(found.bounds[i].budget_bytes) for i in columns))
    if any(found.asked):
        table.add_row("", *(_asked(found.asked[i]) for i in columns))
    for row in found.rows:
        if not row.refused:
            table.add_row(row.solver, *(_cell(found, row, i) for i in columns))
    table.add_row("bound", *(percent_text(found.bounds[i].overhead) for i in columns))
    return table


def _asked(text: str) -> Text:
    return Text("" if text == THIS_PLAN else text, style="dim")


def _cell(found: Comparison, row: Compared, i: int) -> str:
    if not row.cells[i].fits:
        return "-"
    mark = " *" if row.solver in found.best(i) else ""
    return percent_text(row.cells[i].overhead) + mark
