"""Schedules of other solvers, as starts where one cut leaves the gap open.

Near the least peak, policies now and then fit where repair does not. They take some .1 s on a
hundred ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from remat.solver import stopping
from remat.solver.blocks.hierarchical import Hierarchical
from remat.solver.bounds.cut_program import CutProgram, expand
from remat.solver.bounds.least_peak import prove_nothing_fits
from remat.solver.local_search.neighbourhoods import LargeNeighbourhoods, runs_by_stage
from remat.solver.local_search.repair import Repair, fill, offer_filled
from remat.solver.policies.online import offer_policy
from remat.solver.policies.policies import Dtr, LargestPolicy, MspsPolicy
from remat.solver.problem import largest_working_set_bytes
from remat.solver.search import Search
from remat.solver.segments.chen_sqrt import chen_state
from remat.solver.segments.lower_set import LowerSet
from remat.solver.state import State
from remat.solver.stopping import POLICY_RUNS
from remat.solver.table import Solver

# Down from the peak, budget by budget. Greedy repair far below the peak ends where no drop helps,
# while values that need not have been dropped take the room. So at each budget between,
# neighbourhoods make the schedule better first: then repair has more to drop.
# Source: a homotopy in the budget (Allgower and Georg 1990,
# https://doi.org/10.1007/978-3-642-61257-2). Cost: about a second a step on 250 to 1,000 ops.

# Of the way to the budget: the first step, halved where repair cannot follow; the least; the next.
_STEP, _LEAST_STEP, _NEXT_STEP = 1 / 4, 1 / 32, 1 / 16
POWERS = (0.6, 1.0)
_WORKERS = 2


def offer_budget_continuation(search: Search, plain: State, *, is_patient: bool) -> None:
    """Come down from the peak; `is_patient` goes on where the way is hard."""
    prove_nothing_fits(search)  # where nothing fits there is no way
    end_s = search.left_s - stopping.BUDGET_CONTINUATION.of(search.left_s)
    peak_bytes = int(plain.peak_bytes.max())
    way_bytes = peak_bytes - search.budget_bytes
    state, level_bytes, step, effort = plain, peak_bytes, _STEP, stopping.FIRST_DESCENT
    while search.left_s > end_s and not search.proved_infeasible:
        below_bytes = max(level_bytes - max(int(step * way_bytes), 1), search.budget_bytes)
        search.say(f"from above, by a schedule for {below_bytes} bytes")
        found = _repaired(search, state, below_bytes)
        if found is not None and below_bytes == search.budget_bytes:
            search.offer(found)
            return
        if found is not None:
            effort = stopping.FIRST_DESCENT
            state, level_bytes = _improved(search, found, below_bytes, effort), below_bytes
        elif step > _LEAST_STEP:
            step /= 2
        elif effort < (stopping.LAST_DESCENT if is_patient else stopping.SOON_DESCENT):
            # Smaller steps do not help: a better schedule leaves repair more to drop.
            effort, step = 2 * effort, _NEXT_STEP
            state = _improved(search, state, level_bytes, effort)
        else:
            return


def _repaired(search: Search, start: State, limit_bytes: int) -> State | None:
    """The quickest repair under the limit, filled; None if there is none."""
    best: State | None = None
    for power in POWERS:
        state = start.copy()
        most_work = stopping.CONTINUATION_REPAIR.from_now(search.work)
        if Repair(state, limit_bytes, power, search, most_work=most_work).run():
            fill(state, limit_bytes, search)  # repair drops more than it must
            if best is None or state.cost_us < best.cost_us:
                best = state
    return best


def _improved(search: Search, state: State, budget_bytes: int, effort: float) -> State:
    """What neighbourhoods make of `state` with so much of CP-SAT's deterministic time."""
    inner = Search(search.graph, budget_bytes, search.solver, search.left_s)
    if not inner.offer(state):
        return state
    LargeNeighbourhoods(inner, search.out_of_time, workers=_WORKERS).run(effort)
    assert inner.best is not None
    return State.from_recomputed(search.problem, runs_by_stage(search.problem, inner.best))


# Ways down to the least peak known: greedy repair under a limit lowered by 2 % again and again,
# from square-root checkpointing, from what keeps everything, from cuts near the largest working
# set, and on large graphs from blocks that keep the least. Cost: some seconds on a thousand ops.

_LEAST_TARGETS = (0.05, 0.2)  # of the room from the largest working set to the peak, for cuts


def offer_least_peak(search: Search, plain: State) -> None:
    """Name the least peak known, or take its schedule if it fits after all."""
    search.offer_least(plain)  # the ways down may take all the time: so much is known at once
    prove_nothing_fits(search)
    if search.out_of_time():
        return
    search.say("looking for the least peak")
    checkpointed = chen_state(search.problem)  # what people try first: no budget named is above
    search.offer_least(checkpointed)
    # From the graph alone: a solve for the budget that is named finds this schedule again.
    for start in _least_peak_starts(search, plain, checkpointed):
        for power in POWERS:
            _repair_ever_lower(search, start.copy(), power)
    if search.best_state is not None:
        offer_filled(search, search.best_state.copy())


def _least_peak_starts(search: Search, plain: State, checkpointed: State) -> Iterator[State]:
    if search.is_large:  # a long way on large graphs: it begins where blocks keep the least
        yield from Hierarchical().least_states(search)
    # Square roots later: on random wiring the way from them ended at 56 % of the peak, not 26.
    yield plain
    problem = search.problem
    least_bytes = largest_working_set_bytes(problem)
    peak_bytes = plain.peak_bytes
    place = int(np.argmax(peak_bytes[: problem.n_ops]))
    room = int(peak_bytes[place]) - problem.resident_bytes - least_bytes
    for part in _LEAST_TARGETS:
        if search.out_of_time():
            return
        target_bytes = problem.resident_bytes + least_bytes + int(part * room)
        program = CutProgram(problem, (place,), target_bytes)
        solution = program.relaxed(stopping.RELAXED.of(search.left_s))
        if solution.values is not None:
            yield State.from_recomputed(problem, expand(solution))
    if not search.is_large:
        yield checkpointed


def _repair_ever_lower(search: Search, state: State, power: float) -> None:
    while not search.out_of_time():
        peak_bytes = int(state.peak_bytes.max())
        search.offer_least(state)
        if not Repair(state, peak_bytes - max(peak_bytes // 50, 1), power, search).run():
            search.offer_least(state)  # it may have come lower before it failed
            return


_QUICK_OPS = 128  # on graphs of at most so many ops policies take less than the way from above
_FEW_OPS = 3000  # beyond, `largest`, which scans all that is live each time, takes too long


def offer_first(search: Search, plain: State, *, is_patient: bool, policies: bool = False) -> None:
    """Offer what may fit, the quickest first, until something does."""
    is_quick = search.problem.n_ops <= _QUICK_OPS
    # 5 s at most on a narrow graph of 1,000 ops; they also name the least budget.
    if search.best is None and search.lowest is None and not search.is_large:
        offer_least_peak(search, plain)
    if search.best is None and policies and is_quick:
        offer_policies(search)
    if search.best is None:
        offer_budget_continuation(search, plain, is_patient=is_patient)


def offer_policies(search: Search) -> None:
    for name, make in (("dtr", Dtr().make), ("msps", MspsPolicy), ("largest", LargestPolicy)):
        if search.out_of_time() or (name == "largest" and search.problem.n_ops > _FEW_OPS):
            continue
        search.say(f"planning as {name} does")
        offer_policy(search, make, POLICY_RUNS)


def _offer_start(search: Search, solver: Callable[..., Solver], doing: str) -> None:
    if search.out_of_time():
        return
    search.say(doing)
    limit_s = stopping.START.of(search.left_s)
    found = solver(time_limit_s=limit_s).solve(search.graph, search.budget_bytes)
    if found.schedule is not None:
        search.offer_schedule(found.schedule)


def offer_segments(search: Search) -> None:
    _offer_start(search, LowerSet, "segments between lower sets")
