"""The overhead of a family at sizes of its range, beside plans for each of these sizes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import msgspec

import remat.solver as solvers
from remat.budgets import parse_budget
from remat.formats import bytes_text, percent_text, time_text
from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.sizes.symbols import spread
from remat.schedules.family import Family, simulate_resized, sizes_text
from remat.schedules.outcome import Result
from remat.solver.reductions.sizes import Reach, plan_family

_SIZES = 10  # sizes of a curve that names none


class _CurvePoint(msgspec.Struct, frozen=True):
    sizes: dict[str, int]  # by symbol
    member: int  # number of the schedule that serves them
    peak_bytes: int
    time_us: float
    unmodified_us: float  # keeping everything
    overhead: float
    alone_overhead: float | None = None  # of a plan for these sizes alone; None if not made


class Curve(msgspec.Struct, frozen=True):
    model: str
    budget_bytes: int
    points: tuple[_CurvePoint, ...]

    def __str__(self) -> str:
        head = f"{self.model} within {bytes_text(self.budget_bytes)}"
        rows = [_point_row(point) for point in self.points]
        return "\n".join([head, "  sizes | peak | step | overhead | planned alone", *rows])


def overheads_over(
    graph: RangedGraph, family: Family, sizes: int | Sequence[Mapping[str, int]] = _SIZES, *,
    alone: bool = False, solver: str = "auto", time_limit_s: float = 60.0, **options: Any,
) -> Curve:  # fmt: skip
    if graph.traced_hash != family.traced_hash:
        raise ScheduleError(
            "pass the graph that the family was solved on: it was made for another step of "
            f"{family.model}"
        )
    asked = spread(Reach(graph, 0).levels, sizes) if isinstance(sizes, int) else sizes
    points: list[_CurvePoint] = []
    for one in asked:
        at, number = graph.at(**one), family.number_at(**one)
        found = simulate_resized(at, family.members[number].schedule)
        planned = None
        if alone:
            result = solvers.solve_within(
                at, family.budget_bytes, solver, time_limit_s=time_limit_s, **options
            )
            planned = None if result.schedule is None else result.overhead
        figures = found.peak_bytes, found.time_us, at.base_us, found.overhead, planned
        points.append(_CurvePoint(dict(one), number, *figures))
    return Curve(family.model, family.budget_bytes, tuple(points))


def _point_row(point: _CurvePoint) -> str:
    planned = "-" if point.alone_overhead is None else percent_text(point.alone_overhead)
    return (
        f"  {sizes_text(point.sizes)} | {bytes_text(point.peak_bytes)} | "
        f"{time_text(point.time_us)} | {percent_text(point.overhead)} | {planned}"
    )


_CUT_PART = 0.25
"""Of the limit, for each schedule but the largest's: up to eight take twice as long at most."""


def solve_top(
    graph: RangedGraph, budget: str | SupportsIndex, solver: str = "auto",
    time_limit_s: float = 60.0, **options: Any,
) -> Result:  # fmt: skip
    # Peaks are proved for all sizes, what is reserved for none but those replayed.
    asked = replace(parse_budget(budget), is_allocated=True)
    bounding = graph.bounding(graph.symbols)
    return asked.solve(bounding, solver, time_limit_s=time_limit_s, **options)


def solve_over(
    graph: RangedGraph, budget: str | SupportsIndex, solver: str = "auto",
    time_limit_s: float = 60.0, *, top: Result | None = None, **options: Any,
) -> Family:  # fmt: skip
    """`top`: the outcome at the largest sizes, if known."""
    # The largest sizes first: their schedule serves all, and says what the budget is in bytes.
    top = top or solve_top(graph, budget, solver, time_limit_s, **options)

    def solve_part(part: TrainingGraph, budget_bytes: int) -> Result:
        limit_s = _CUT_PART * time_limit_s
        return solvers.solve_within(part, budget_bytes, solver, time_limit_s=limit_s, **options)

    return plan_family(graph, top.budget_bytes, solve_part, top)
