"""The tables of the page, as rows of text; they are there without its script too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from remat.formats import bytes_text, percent_text, time_text
from remat.graph_capture.graph import Op, Value
from remat.schedules.kept_in_forward import live_after_forward
from remat.schedules.module_groups import place_of
from remat.schedules.report.data import Summary
from remat.schedules.report.facts import Alternative, Facts
from remat.schedules.simulate import simulate

MOST_ROWS = 40
NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """A table; the first column names the row, those in `numbers` stand on the right."""

    name: str
    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()


def tables(facts: Facts, summary: Summary) -> list[Table]:
    """The tables, in the order of the page; those without rows are left out."""
    made = (at_peak(facts), kept(facts), computed_again(facts), alternatives(facts, summary))
    return [table for table in made if table.rows]


def steps(summary: Summary) -> Table:
    """The unmodified step and the plan, and what was measured."""
    rows = [
        ("unmodified", summary.unmodified_peak_bytes, summary.unmodified_time_us, None),
        ("this plan", summary.peak_bytes, summary.time_us, summary.overhead),
        ("this plan, measured", summary.measured_peak_bytes, summary.measured_time_us, None),
    ]
    texts = tuple(
        (name, bytes_text(peak), *(_or_nothing(time_us, time_text), _or_nothing(more, percent_text)))
        for name, peak, time_us, more in rows
        if peak is not None
    )
    return Table("steps", "The step", ("", "peak", "time", "overhead"), texts, (1, 2, 3))


def _or_nothing(figure: float | None, text: object) -> str:
    assert callable(text)
    return NOTHING if figure is None else str(text(figure))


def at_peak(facts: Facts) -> Table:
    """The largest values live at the peak."""
    graph = facts.graph
    found = simulate(graph, facts.schedule)
    values = [graph.value_by_name[name] for name in found.held_at_peak]
    maker = {op.name: op for op in graph.ops}
    rows = tuple(_value_row(value, maker[value.producer]) for value in values[:MOST_ROWS])
    rest = sum(value.size_bytes for value in values[MOST_ROWS:])
    caption = (
        f"Live at the peak: {len(values)} values beside {bytes_text(graph.resident.total_bytes)} "
        f"resident and {bytes_text(found.workspace_at_peak_bytes)} of workspace"
    )
    if rest:
        caption += f"; not shown: {len(values) - MOST_ROWS} smaller ones, {bytes_text(rest)} in all"
    headers = ("value", "size", "kind", "shape", "op", "module", "line")
    return Table("peak", caption, headers, rows, (1,))


def _value_row(value: Value, op: Op) -> tuple[str, ...]:
    shape = f"{value.dtype}{list(value.shape)}"
    size = bytes_text(value.size_bytes)
    return value.name, size, value.kind, shape, op.target, op.module or NOTHING, op.source


def kept(facts: Facts) -> Table:
    """What forward keeps for backward, equal places of all layers together."""
    graph = facts.graph
    live = live_after_forward(graph, facts.schedule)
    groups: dict[tuple[str, str], list[int]] = {}
    for value in graph.values:
        if value.name in live and value.producer:
            op = graph.ops[graph.op_index[value.producer]]
            groups.setdefault((place_of(op.module), op.target), []).append(value.size_bytes)
    ranked = sorted(groups.items(), key=lambda group: -sum(group[1]))
    rows = [
        (place, target, str(len(sizes)), bytes_text(sum(sizes)))
        for (place, target), sizes in ranked[:MOST_ROWS]
    ]
    total = bytes_text(sum(sum(sizes) for sizes in groups.values()))
    caption = f"Live when forward ends: {len(live)} values, {total}"
    return Table("kept", caption, ("module", "op", "values", "size"), tuple(rows), (2, 3))


def computed_again(facts: Facts) -> Table:
    """What is computed again, equal places of all layers together."""
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
    base_us = facts.graph.time_us
    points = [*facts.rules, *(point for _, curve in facts.fronts for point in curve)]
    rows = [_point_row(point, summary.budget_bytes, base_us) for point in _ranked(points)]
    headers = ("schedule", "budget", "peak", "time", "overhead", "bound", "fits yours")
    caption = "Other schedules of this step, by peak"
    return Table("others", caption, headers, tuple(rows[:MOST_ROWS]), (1, 2, 3, 4, 5))


def _ranked(points: Iterable[Alternative]) -> list[Alternative]:
    return sorted(points, key=lambda point: (-point.peak_bytes, point.time_us))


def _point_row(point: Alternative, budget_bytes: int, base_us: float) -> tuple[str, ...]:
    bound = point.lower_bound_us / base_us - 1 if base_us and point.lower_bound_us else None
    fits = "yes" if point.peak_bytes <= budget_bytes else "no"
    return (
        point.name,
        bytes_text(point.budget_bytes) if point.budget_bytes else NOTHING,
        bytes_text(point.peak_bytes),
        time_text(point.time_us),
        percent_text(point.overhead),
        NOTHING if bound is None else percent_text(max(bound, 0.0)),
        fits if budget_bytes else NOTHING,
    )
