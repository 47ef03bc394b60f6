"""Down from the peak, budget by budget: each schedule is improved before the next is asked for.

Greedy repair drops what helps most at the moment. Far below the peak it ends where no drop helps
any more, while values that need not have been dropped take the room. So the way down goes in steps.
At each budget between, neighbourhoods make the schedule better first: one that computes less again
leaves repair more to drop.

Source: a homotopy, as in continuation methods (Allgower and Georg 1990,
https://doi.org/10.1007/978-3-642-61257-2), whose parameter is the budget. Optimal: no. Cost: about
a second a step on 250 to 1,000 ops, counted by what no clock moves; the way ends after 70 % of
the time that is left.
"""

from __future__ import annotations

from remat.solver.bounds.floor import prove_nothing_fits
from remat.solver.local_search.large_neighbourhood import LargeNeighbourhoods, runs_by_stage
from remat.solver.local_search.repair import Repair, fill
from remat.solver.search import Search
from remat.solver.state import State
from remat.solver.stopping import (
    FIRST_DESCENT,
    FROM_ABOVE,
    FROM_ABOVE_REPAIR,
    LAST_DESCENT,
    SOON_DESCENT,
)

STEP, LEAST_STEP, NEXT_STEP = 1 / 4, 1 / 32, 1 / 16
"""Of the way from the peak to the budget: the first step, which is halved where repair cannot
follow; the least; and the one that comes after that, behind more improvement."""
POWERS = (0.6, 1.0)
WORKERS = 2


def take_from_above(search: Search, plain: State, *, is_patient: bool) -> None:
    """Offer a schedule that comes down to the budget, if the way does not end before.

    Parameters
    ----------
    plain : keeps everything. is_patient : try long where the way is hard; else it ends soon, for
        other starts to come first.
    """
    prove_nothing_fits(search)
    end_s = search.left_s - FROM_ABOVE.of(search.left_s)
    peak_bytes = int(plain.peak_bytes.max())
    way_bytes = peak_bytes - search.budget_bytes
    state, level_bytes, step, effort = plain, peak_bytes, STEP, FIRST_DESCENT.most
    while search.left_s > end_s and not search.proved_infeasible:
        below_bytes = max(level_bytes - max(int(step * way_bytes), 1), search.budget_bytes)
        search.say(f"from above, by a schedule for {below_bytes} bytes")
        found = _repaired(search, state, below_bytes)
        if found is not None and below_bytes == search.budget_bytes:
            search.offer(found)
            return
        if found is not None:
            effort = FIRST_DESCENT.most
            state, level_bytes = _improved(search, found, below_bytes, effort), below_bytes
        elif step > LEAST_STEP:
            step /= 2
        elif effort < (LAST_DESCENT if is_patient else SOON_DESCENT).most:
            effort, step = 2 * effort, NEXT_STEP
            state = _improved(search, state, level_bytes, effort)
        else:
            return


def _repaired(search: Search, start: State, limit_bytes: int) -> State | None:
    """The quickest of what repairs make of `start` under the limit, with what fits carried."""
    best: State | None = None
    for power in POWERS:
        state = start.copy()
        most_work = FROM_ABOVE_REPAIR.from_now(search.work)
        if Repair(state, limit_bytes, power, search, most_work=most_work).run():
            fill(state, limit_bytes, search)
            if best is None or state.cost_us < best.cost_us:
                best = state
    return best


def _improved(search: Search, state: State, budget_bytes: int, effort: float) -> State:
    """What neighbourhoods make of a state, in so much of CP-SAT's deterministic time."""
    inner = Search(search.graph, budget_bytes, search.solver, search.left_s)
    if not inner.offer(state):
        return state
    around = LargeNeighbourhoods(inner, search.out_of_time, workers=WORKERS)
    around.run(effort)
    assert inner.best is not None
    return State.from_recomputed(search.problem, runs_by_stage(search.problem, inner.best))
