"""The answer of `compare`: budgets against solvers and simple rules, and its screen."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from remat.formats import bytes_text, percent_text, time_text
from remat.questions.tables import plain_table, rendered

UNMODIFIED = "unmodified"
THIS_PLAN = "this plan"

NAME_COLUMNS = 24
CELL_COLUMNS = 13
"""Columns of the screen that a solver's name takes, and a cell."""


class Cell(msgspec.Struct, frozen=True):
    """One solver at one budget; figures are 0 where it found nothing that fits.

    `over_bound` is the time over the best bound at that budget, minus one. `arena_bytes` is what
    its buffers take in one arena beside what is resident, 0 where they were not placed.
    """

    budget_bytes: int
    fits: bool
    status: str
    peak_bytes: int
    time_us: float
    overhead: float
    over_bound: float
    wall_s: float
    arena_bytes: int = 0


class Compared(msgspec.Struct, frozen=True):
    """One solver at all budgets.

    `refused` says why it does not take this graph, and there are no cells then.
    """

    solver: str
    cells: tuple[Cell, ...]
    wall_s: float
    refused: str = ""


class Bound(msgspec.Struct, frozen=True):
    """The best proven bound at a budget, in captured order, and who proved it."""

    budget_bytes: int
    overhead: float
    lower_bound_us: float
    solver: str


class Comparison(msgspec.Struct, frozen=True):
    """Budgets against solvers and baselines, with the bound at each budget.

    Attributes
    ----------
    base_us, unmodified_bytes : time of every op once, and peak of the unmodified step.
    asked : the budgets as they were written. bounds : one a budget. rows : one a solver, in the
        order asked; the unmodified step, and where there is one the plan at hand, come first.
    """

    model: str
    device: str
    prices: str
    base_us: float
    unmodified_bytes: int
    asked: tuple[str, ...]
    bounds: tuple[Bound, ...]
    rows: tuple[Compared, ...]

    def best(self, i: int) -> tuple[str, ...]:
        """The solvers whose plan is the fastest at the i-th budget."""
        found = [row for row in self.rows if row.cells and row.cells[i].fits]
        least_us = min((row.cells[i].time_us for row in found), default=0.0)
        return tuple(row.solver for row in found if row.cells[i].time_us <= least_us * (1 + 1e-9))

    def as_json(self) -> dict[str, Any]:
        """Plain bytes, microseconds and names, for `--json`."""
        best = [self.best(i) for i in range(len(self.bounds))]
        return {**msgspec.to_builtins(self), "best": best}

    def __str__(self) -> str:
        return rendered(comparison_screen(self))

    __repr__ = __str__


def comparison_screen(found: Comparison, width: int = 100) -> RenderableType:
    """Overheads by solver and budget; the best at each budget is marked."""
    most = max((width - NAME_COLUMNS) // CELL_COLUMNS, 1)
    parts: list[RenderableType] = [_compared_line(found)]
    count = len(found.bounds)
    for first in range(0, count, most):
        parts += [Text(), _table(found, range(first, min(first + most, count)))]
    refused = [row for row in found.rows if row.refused]
    parts += [Text(), Text("* the fastest found at this budget; - finds nothing that fits")]
    parts += [Text(f"{row.solver}: {row.refused}", style="dim") for row in refused]
    return Group(*parts)


def _compared_line(found: Comparison) -> Text:
    return Text.assemble(
        (found.model, "bold"),
        f", {found.prices} on {found.device}: unmodified {bytes_text(found.unmodified_bytes)}, "
        f"{time_text(found.base_us)} a step; overheads of each solver's plan",
    )


def _table(found: Comparison, columns: range) -> Table:
    """Overheads, and arenas below them where buffers were placed."""
    table = plain_table("budget", *(bytes_text(found.bounds[i].budget_bytes) for i in columns))
    if any(found.asked):
        table.add_row("", *(_asked(found.asked[i]) for i in columns))
    best = {i: found.best(i) for i in columns}
    for row in found.rows:
        if not row.refused:
            cells = (_overhead_text(row.cells[i], row.solver in best[i]) for i in columns)
            table.add_row(row.solver, *cells)
            if any(row.cells[i].arena_bytes for i in columns):
                table.add_row("  arena", *(_arena_text(row.cells[i]) for i in columns))
    table.add_row("bound", *(percent_text(found.bounds[i].overhead) for i in columns))
    return table


def _asked(text: str) -> Text:
    return Text("" if text == THIS_PLAN else text, style="dim")


def _arena_text(cell: Cell) -> Text:
    return Text(bytes_text(cell.arena_bytes) if cell.arena_bytes else "", style="dim")


def _overhead_text(cell: Cell, is_best: bool) -> str:
    if not cell.fits:
        return "-"
    return percent_text(cell.overhead) + (" *" if is_best else "")
