"""The least budget that is known to do, and what stands in the way of a smaller one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.schedules.verdicts.peak_holders import PeakHolders, peak_holders
from remat.solver import solve
from remat.solver.budgets.worth import least_peak
from remat.solver.result import Holding


class LeastBudget(msgspec.Struct, frozen=True):
    """The least peak known, and the op that sets it.

    Attributes
    ----------
    least_bytes : peak of the schedule behind it; 0 where none is known.
    at_peak : who holds it: the op that runs then sets it. None where no schedule is at hand.
    floor : op and bytes below which an output of the step would have to be made again. None
        where it was not sought.
    proved_bytes : no schedule's peak is below; 0 where that was not proved.
    """

    least_bytes: int
    at_peak: PeakHolders | None
    floor: Holding | None
    proved_bytes: int


def least_budget(
    graph: TrainingGraph, asked: Mapping[str, Any], time_limit_s: float
) -> LeastBudget:
    """What the solver that is asked for knows of the least peak of a graph, with its pins."""
    named = solve(graph, 0, time_limit_s=time_limit_s, **asked)
    schedule: Schedule | None = named.least_schedule
    if schedule is None or schedule.graph_hash != graph.hash:
        schedule = least_peak(graph, time_limit_s, **asked).schedule
    held = peak_holders(graph, schedule) if schedule is not None else None
    return LeastBudget(
        least_bytes=held.peak_bytes if held else named.least_feasible_bytes,
        at_peak=held,
        floor=named.floor,
        proved_bytes=named.least_bound_bytes,
    )
