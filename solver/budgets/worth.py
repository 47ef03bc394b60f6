"""What memory is worth near one budget: the least that will do, and the price of a GiB."""

from __future__ import annotations

from typing import Any

import msgspec

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.solver import solve
from remat.solver.budgets.price import GibPrice, checked_step
from remat.solver.budgets.sweep import is_ideal
from remat.solver.clock import Clock
from remat.solver.interrupts import is_interrupted, one_job
from remat.solver.result import Result, at_least_budget
from remat.solver.stopping import FIRST_SOLVE, SECOND_SOLVE


def least_peak(
    graph: TrainingGraph,
    time_limit_s: float = 60.0,
    *,
    solver: str = "auto",
    **options: Any,
) -> Result:
    """The outcome at the least peak that `solver` knows: the least budget to ask for.

    If none is named, the infeasible result that says so. The least peak is one that was
    found, not one that is proved to be least.
    """
    clock = Clock(time_limit_s)
    first_s = FIRST_SOLVE.of(time_limit_s)
    with one_job():
        named = solve(graph, 0, solver, time_limit_s=first_s, **options)
        if named.schedule is not None or not named.least_feasible_bytes:
            return named
        at_hand = at_least_budget(graph, named)
        if is_interrupted() and at_hand is not None:
            return msgspec.structs.replace(at_hand, message=named.message)
        left_s = SECOND_SOLVE.of(clock.left_s, time_limit_s)
        found = solve(graph, named.least_feasible_bytes, solver, time_limit_s=left_s, **options)
    if found.schedule is not None or at_hand is None:
        return found
    bound_us = min(max(found.lower_bound_us, at_hand.lower_bound_us), at_hand.time_us)
    return msgspec.structs.replace(
        at_hand, lower_bound_us=bound_us, wall_s=named.wall_s + found.wall_s, message=found.message
    )


def price_of_gib(
    graph: TrainingGraph,
    result: Result,
    *,
    solver: str = "auto",
    step_bytes: int = 0,
    time_limit_s: float = 60.0,
    **options: Any,
) -> GibPrice:
    """What a GiB more than the budget of `result` would save, and one less would cost.

    Each takes a solve with `time_limit_s`, unless the answer is known without. `step_bytes` 0
    stands for one GiB, or 5 % of the peak if that is less. If the smaller budget turns up a
    faster schedule, that counts at every budget.

    Raises
    ------
    SolverError : `result` has no schedule; a negative `step_bytes`.
    """
    if result.schedule is None:
        raise SolverError(
            f"nothing fits {result.budget_bytes} bytes, so memory has no price there: ask at "
            f"{result.least_feasible_bytes or 'more'} bytes"
        )
    step_bytes = checked_step(step_bytes, result.peak_bytes)
    low_bytes = max(result.budget_bytes - step_bytes, 0)
    more = less = result
    if not is_ideal(graph, result):
        above_bytes = result.budget_bytes + step_bytes
        more = solve(graph, above_bytes, solver, time_limit_s=time_limit_s, **options)
    if result.peak_bytes > low_bytes:
        less = solve(graph, low_bytes, solver, time_limit_s=time_limit_s, **options)
    times_us = [r.time_us for r in (result, less) if r.schedule is not None]
    here_us = min(times_us)
    more_us = min(here_us, more.time_us) if more.schedule is not None else here_us
    less_us = less.time_us if less.schedule is not None else None
    return GibPrice(result.budget_bytes, step_bytes, here_us, more_us, less_us)
