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
    """The solver of the table that made it; ``auto`` where none of the table did."""
    return schedule.solver if schedule.solver in TABLE else "auto"


def pins_of(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """The globs that `keep` and `recompute` were given, empty where there were none."""
    return {
        name: tuple(part for part in str(schedule.options.get(name, "")).split(", ") if part)
        for name in PINS
    }


def solve_arguments(schedule: Schedule) -> dict[str, Any]:
    """Arguments by which `solve` solves as the schedule was: solver, its options, pins."""
    name = _solver_of(schedule)
    known = option_names(name)
    options = {key: value for key, value in schedule.options.items() if key in known}
    return {"solver": name, **options, **pins_of(schedule)}


def required_schedule(result: Result) -> Schedule:
    """The schedule of a result that has one."""
    assert result.schedule is not None, "checked before: nothing fits"
    return result.schedule


# The least budget that is known to suffice, and the op that keeps it from being smaller.


class LeastBudget(msgspec.Struct, frozen=True):
    """The least peak known, and the op that sets it.

    Attributes
    ----------
    least_bytes : peak of the schedule behind it.
    at_peak : who holds it: the op that runs then sets it.
    floor : op and bytes below which an output of the step would have to be computed twice. None
        where it was not looked for.
    proved_bytes : a proved bound on the peak of any schedule; 0 where none was proved.
    """

    least_bytes: int
    at_peak: PeakHolders
    floor: Holding | None
    proved_bytes: int


def least_budget(
    graph: TrainingGraph, plan: Schedule, asked: Mapping[str, Any], time_limit_s: float
) -> LeastBudget:
    """The least peak that the solver knows for a graph, or that of `plan` if it is lower.

    Nothing fits into 0 bytes, so the result of that solve names the least budget. A plan with
    copies can be below: the search for the least knows none. `asked` : solver, options and pins.
    """
    named = solve_within(graph, 0, time_limit_s=time_limit_s, **asked)
    schedule: Schedule | None = named.least_schedule
    # With pins the schedule is one of another graph, that with clones: look for one of this graph.
    if schedule is None or schedule.graph_hash != graph.hash:
        schedule = least_peak(graph, time_limit_s, **asked).schedule
    held = peak_holders(graph, schedule) if schedule is not None else None
    of_plan = peak_holders(graph, plan)
    if held is None or of_plan.peak_bytes < held.peak_bytes:
        held = of_plan
    return LeastBudget(
        least_bytes=held.peak_bytes,
        at_peak=held,
        floor=named.floor,
        proved_bytes=named.least_bound_bytes,
    )
