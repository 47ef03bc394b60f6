"""What to say, and to prove, where a budget is below the floor.

The floor (`floor_of` of `least_peak`) is what any schedule needs that never computes an
output of the step again, a gradient above all. Below it schedules must do so; below the
proved bound on the least peak there are none. Costs nothing where the step fits as it is.
"""

from __future__ import annotations

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.solver.bounds.least_peak import effort_for, floor_of, least_peak_bound_bytes
from remat.solver.problem import Problem
from remat.solver.result import Holding
from remat.solver.search import Search

LEAST_BOUND = "No schedule has a peak below"
"""How the sentence begins that gives the bound on the least peak."""


def prove_nothing_fits(search: Search) -> None:
    """Find the bound on the least peak; note in `search` if it proves that nothing fits.

    It takes about a second at most, and holds for first runs in the order of the search's graph.
    """
    if search.best is not None or search.least_bound_bytes or search.left_s <= 0:
        return
    search.say("proving a bound on the least peak")
    problem = search.problem
    search.least_bound_bytes = least_peak_bound_bytes(problem, effort_for(problem))
    if search.least_bound_bytes > search.budget_bytes:
        search.proved_infeasible = True


def note_floor(search: Search) -> None:
    """Add to what the result will say whether the budget is below the floor."""
    search.floor = floor_above(search.problem, search.budget_bytes)
    if search.floor is not None:
        search.note(floor_text(search.graph, search.floor, search.best))
    if search.best is None and search.least_bound_bytes:
        search.note(f"{LEAST_BOUND} {search.least_bound_bytes} bytes")


def floor_above(problem: Problem, budget_bytes: int) -> Holding | None:
    """The floor and the op that sets it, if `budget_bytes` is below."""
    floor = floor_of(problem)
    if budget_bytes >= floor.size_bytes:
        return None
    module = next((op.module for op in problem.graph.ops if op.name == floor.op), "")
    return Holding(floor.op, floor.size_bytes, module)


def floor_text(graph: TrainingGraph, floor: Holding, schedule: Schedule | None) -> str:
    """One sentence: the floor in bytes, its op, and what `schedule` does about it."""
    place = f" ({floor.module})" if floor.module else ""
    at = f", set by op {floor.name}{place}" if floor.name else ""
    text = f"The budget is below the floor of {floor.size_bytes} bytes{at}"
    if schedule is None:
        return f"{text}: what any schedule needs that computes no output of the step again"
    runs = schedule.computations()
    makers = {graph.value_by_name[name].producer for name in graph.outputs} - {""}
    count = sum(runs[maker] > 1 for maker in makers)
    if not count:
        return f"{text}: another order of first computations avoids it"
    return f"{text}: so outputs of the step are recomputed, by {count} of {len(makers)} ops"
