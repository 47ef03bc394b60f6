"""How a schedule was solved, so that the same can be solved at another budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.schedules.value_report.peak_holders import PeakHolders, peak_holders
from remat.solver import TABLE, option_names, solve_within
from remat.solver.budgets.sweep import PINS, least_peak
from remat.solver.result import Holding, Result


def _solver_of(schedule: Schedule) -> str:
    # One of the user's own, or a schedule by hand, cannot be asked again.
    return schedule.solver if schedule.solver in TABLE else "auto"


def pins_of(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    return {
        name: tuple(part for part in str(schedule.options.get(name, "")).split(", ") if part)
        for name in PINS
    }


def solve_arguments(schedule: Schedule) -> dict[str, Any]:
    name = _solver_of(schedule)
    known = option_names(name)
    options = {key: value for key, value in schedule.options.items() if key in known}
    return {"solver": name, **options, **pins_of(schedule)}


def required_schedule(result: Result) -> Schedule:
    assert result.schedule is not None, "checked before: nothing fits"
    return result.schedule


class LeastBudget(msgspec.Struct, frozen=True):
    least_bytes: int
    at_peak: PeakHolders  # the op that runs then sets it
    floor: Holding | None  # below it outputs would be computed twice; None if not looked for
    proved_bytes: int  # a bound on the peak of any schedule; 0 where none was proved


def least_budget(
    graph: TrainingGraph, plan: Schedule, asked: Mapping[str, Any], time_limit_s: float
) -> LeastBudget:
    """The least peak that the solver knows for a graph, or that of `plan` if it is lower."""
    # Nothing fits into 0 bytes, so the result of that solve names the least budget.
    named = solve_within(graph, 0, time_limit_s=time_limit_s, **asked)
    schedule: Schedule | None = named.least_schedule
    # With pins the schedule is one of another graph, that with clones: look for one of this graph.
    if schedule is None or schedule.graph_hash != graph.hash:
        schedule = least_peak(graph, time_limit_s, **asked).schedule
    held = peak_holders(graph, schedule) if schedule is not None else None
    of_plan = peak_holders(graph, plan)
    # A plan with copies can be below: the search for the least knows none.
    if held is None or of_plan.peak_bytes < held.peak_bytes:
        held = of_plan
    return LeastBudget(
        least_bytes=held.peak_bytes,
        at_peak=held,
        floor=named.floor,
        proved_bytes=named.least_bound_bytes,
    )
