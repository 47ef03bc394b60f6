"""Schedules of other solvers, as starts where one cut leaves the gap open.

Near the least peak, policies now and then fit where repair does not. They take some .1 s on a
hundred ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

import numpy as np

from remat.solver import stopping
from remat.solver.backends.processes import Task
from remat.solver.blocks.hierarchical import Hierarchical
from remat.solver.bounds.cut_program import CutProgram, expand
from remat.solver.bounds.least_peak import prove_nothing_fits
from remat.solver.local_search.events import (
    RunningSolvers,
    TryLimits,
    candidate_stages,
    try_events,
)
from remat.solver.local_search.neighbourhoods import (
    FEW_STAGES,
    LargeNeighbourhoods,
    runs_by_stage,
)
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
# from what keeps everything, from cuts near the largest working set, from square-root
# checkpointing, and on large graphs from blocks that keep the least. Cost: some seconds on a
# thousand ops.

_LEAST_TARGETS = (0.05, 0.2)  # of the room from the largest working set to the peak, for cuts


def offer_least_peak(search: Search, plain: State) -> None:
    """Name the least peak known, or take its schedule if it fits after all."""
    if search.is_large:  # the ways down may take all the time: so much is known at once
        search.offer_least(plain)
    prove_nothing_fits(search)
    if search.out_of_time():
        return
    search.say("looking for the least peak")
    checkpointed = chen_state(search.problem)  # what people try first: no budget named is above
    search.offer_least(checkpointed)
    # From the graph alone: a solve for the budget that is named finds this schedule again.
    lowest = plain
    for start in _least_peak_starts(search, plain, checkpointed):
        found = [_repair_ever_lower(search, start.copy(), power) for power in POWERS]
        if _most_bytes(lower := min(found, key=_most_bytes)) < _most_bytes(lowest):
            lowest = _searched_ever_lower(search, lower)
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


def _repair_ever_lower(search: Search, state: State, power: float) -> State:
    """The lowest on the way; each is offered."""
    lowest = state.copy()
    while not search.out_of_time():
        search.offer_least(state)
        peak_bytes = _most_bytes(state)
        is_repaired = Repair(state, peak_bytes - max(peak_bytes // 50, 1), power, search).run()
        if _most_bytes(state) < _most_bytes(lowest):  # it may have come lower before it failed
            lowest = state.copy()
        if not is_repaired:
            break
    search.offer_least(lowest)
    return lowest


# A repair moves one gap at a time. Where none helps, CP-SAT moves all that is live at the fullest
# moments, and repairs go on from there: 26 % of the peak for 31 on a heavy-tailed net of 232 ops.

_LOWER, _LEAST_LOWER = 1 / 20, 1 / 100  # part of the peak that is to be saved: first, at least
_MOST_CHOSEN = 300  # ops: with more, CP-SAT found nothing in its time


def _searched_ever_lower(search: Search, state: State) -> State:
    part = _LOWER
    while part > _LEAST_LOWER and search.best is None and not search.out_of_time():
        search.say(f"looking for a peak {100 * part:.1f} % lower")
        found = _with_less(search, state, int((1 - part) * _most_bytes(state)))
        if found is None:
            part /= 2
        else:
            state = _repair_ever_lower(search, found, POWERS[0])
    return state


def _with_less(search: Search, state: State, limit_bytes: int) -> State | None:
    """What CP-SAT makes of `state` under the limit; None where it finds nothing."""
    problem = search.problem
    chosen = _ops_at(state, np.flatnonzero(state.peak_bytes > limit_bytes).tolist())
    if len(chosen) > _MOST_CHOSEN:
        return None
    runs = state.runs
    stages_of = candidate_stages(problem, runs, chosen, FEW_STAGES)
    room_bytes, running = limit_bytes - problem.resident_bytes, RunningSolvers()
    effort = TryLimits(stopping.LEAST_NEIGHBOURHOOD, search.left_s)
    with Task(
        lambda: try_events(problem, runs, stages_of, room_bytes, inf, effort, running), running.stop
    ) as trying:
        found = trying.wait()
    if found.runs is None:
        return None
    lower = State.from_recomputed(problem, found.runs)
    return lower if _most_bytes(lower) <= limit_bytes else None


def _ops_at(state: State, stages: Sequence[int]) -> list[int]:
    """What runs again in `stages`, or makes what is live there, and what these read."""
    problem = state.problem
    live = np.flatnonzero(state.kept[stages].any(0) | state.kept[np.add(stages, 1)].any(0))
    found = {problem.producer[v] for v in live.tolist()}
    found.update(op for stage in stages for op in state.stages[stage].recomputed)
    return sorted(found.union(problem.producer[v] for op in found for v in problem.inputs[op]))


def _most_bytes(state: State) -> int:
    return int(state.peak_bytes.max())


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
