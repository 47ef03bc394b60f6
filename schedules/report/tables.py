"""The tables of the page, as rows of text. They show without the page's script too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from remat.formats import bytes_text, percent_text, proved_text, time_text
from remat.schedules.report.columns import Summary
from remat.schedules.report.facts import Alternative, Facts
from remat.schedules.simulate import bound_of, simulate
from remat.schedules.verdicts.folding import FoldedRow, folded
from remat.schedules.verdicts.rows import ValueRow, value_rows
from remat.schedules.views.module_groups import OUTSIDE, place_of

MOST_ROWS = 30
NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """A table. The first column names the row; columns in `numbers` are aligned right."""

    name: str
    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()


def tables(facts: Facts, summary: Summary) -> list[Table]:
    """The tables, in the order of the page, without those that have no rows."""
    rows = value_rows(facts.graph, facts.schedule)
    made = (
        at_peak(facts, rows), kept(rows), to_the_host(rows), computed_again(facts),
        alternatives(facts, summary),
    )  # fmt: skip
    return [table for table in made if table.rows]


def steps(summary: Summary) -> Table:
    """The unmodified step and the plan, and what was measured."""
    rows = [
        ("unmodified", summary.unmodified_peak_bytes, summary.unmodified_time_us, None),
        ("this plan", summary.peak_bytes, summary.time_us, summary.overhead),
        ("this plan, measured", summary.measured_peak_bytes, summary.measured_time_us, None),
    ]
    texts = tuple(
        (
            name,
            bytes_text(peak),
            *(_or_nothing(time_us, time_text), _or_nothing(more, percent_text)),
        )
        for name, peak, time_us, more in rows
        if peak is not None
    )
    return Table("steps", "The step", ("schedule", "peak", "time", "overhead"), texts, (1, 2, 3))


def _or_nothing(figure: float | None, text: Callable[[float], str]) -> str:
    return NOTHING if figure is None else text(figure)


def at_peak(facts: Facts, rows: Sequence[ValueRow]) -> Table:
    """What is live at the peak, equal layers folded."""
    graph = facts.graph
    found = simulate(graph, facts.schedule)
    caption = (
        f"Live at the peak: {len(found.held_at_peak)} values beside "
        f"{bytes_text(graph.resident.total_bytes)} resident and "
        f"{bytes_text(found.workspace_at_peak_bytes)} of workspace"
    )
    return _of_values("peak", caption, [row for row in rows if row.at_peak])


def to_the_host(rows: Sequence[ValueRow]) -> Table:
    """What is copied to the host, equal layers folded."""
    chosen = [row for row in rows if row.verdict == "offload"]
    size_bytes = sum(row.size_bytes for row in chosen)
    caption = f"Copied to the host: {len(chosen)} values, {bytes_text(size_bytes)}"
    return _of_values("host", caption, chosen)


def kept(rows: Sequence[ValueRow]) -> Table:
    """What forward keeps for backward, equal layers folded."""
    chosen = [row for row in rows if row.verdict == "keep"]
    size_bytes = sum(row.size_bytes for row in chosen)
    caption = f"Kept from forward for backward: {len(chosen)} values, {bytes_text(size_bytes)}"
    return _of_values("kept", caption, chosen)


def _of_values(name: str, caption: str, rows: Sequence[ValueRow]) -> Table:
    """One row for equal layers, most bytes first."""
    found = sorted(folded(rows), key=lambda row: -row.size_bytes)
    rest = found[MOST_ROWS:]
    if rest:
        rest_bytes = sum(row.size_bytes for row in rest)
        caption += f"; not shown: {len(rest)} smaller rows, {bytes_text(rest_bytes)}"
    headers = ("module", "values", "size", "together", "kind", "shape", "op", "line")
    return Table(name, caption, headers, tuple(map(_value_row, found[:MOST_ROWS])), (1, 2, 3))


def _value_row(row: FoldedRow) -> tuple[str, ...]:
    first = row.first
    return (
        row.module or OUTSIDE,
        str(row.count),
        bytes_text(first.size_bytes),
        bytes_text(row.size_bytes),
        first.kind,
        f"{first.dtype}{list(first.shape)}",
        first.target,
        first.source,
    )


def computed_again(facts: Facts) -> Table:
    """What is computed again, summed over the same place in all layers."""
    graph, runs = facts.graph, facts.schedule.computations()
    groups: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for op in graph.ops:
        more = runs[op.name] - 1
        if more > 0:
            key = place_of(op.module), op.target
            groups.setdefault(key, []).append((more, more * op.cost_us))
    ranked = sorted(groups.items(), key=lambda group: -sum(us for _, us in group[1]))
    rows = [
        (
            place,
            target,
            str(len(found)),
            str(sum(more for more, _ in found)),
            time_text(sum(us for _, us in found)),
        )
        for (place, target), found in ranked[:MOST_ROWS]
    ]
    ops = sum(len(found) for found in groups.values())
    spent_us = sum(us for found in groups.values() for _, us in found)
    caption = f"Computed again: {ops} ops, {time_text(spent_us)} more than once each"
    headers = ("module", "op", "ops", "further runs", "time of these")
    return Table("again", caption, headers, tuple(rows), (2, 3, 4))


def alternatives(facts: Facts, summary: Summary) -> Table:
    """Other schedules of the step."""
    base_us = facts.graph.base_us
    points = [*facts.rules, *(point for _, curve in facts.fronts for point in curve)]
    rows = [_point_row(point, summary.budget_bytes, base_us) for point in _ranked(points)]
    headers = ("schedule", "budget", "peak", "time", "overhead", facts.bound_name, "fits yours")
    caption = "Other schedules of this step, by peak"
    return Table("others", caption, headers, tuple(rows[:MOST_ROWS]), (1, 2, 3, 4, 5))


def _ranked(points: Iterable[Alternative]) -> list[Alternative]:
    return sorted(points, key=lambda point: (-point.peak_bytes, point.time_us))


def _point_row(point: Alternative, budget_bytes: int, base_us: float) -> tuple[str, ...]:
    fits = "yes" if point.peak_bytes <= budget_bytes else "no"
    return (
        point.name,
        bytes_text(point.budget_bytes) if point.budget_bytes else NOTHING,
        bytes_text(point.peak_bytes),
        time_text(point.time_us),
        percent_text(point.overhead),
        proved_text(bound_of(point.lower_bound_us, base_us)),
        fits if budget_bytes else NOTHING,
    )
