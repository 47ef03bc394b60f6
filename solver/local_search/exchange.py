"""Exchanges of what is kept: carry what does not fit, and repair elsewhere, while that pays.

Also called: add-drop local search. A gap is carried, then as many are dropped as that takes.
Cost: each try takes about as much as there are ops; the moves that were weighed end it.
"""

from __future__ import annotations

import heapq

import numpy as np

from remat.solver.local_search.repair import (
    GapMove,
    Repair,
    apply,
    carriable,
    fill,
    try_move,
    work_of,
)
from remat.solver.search import Search
from remat.solver.state import State
from remat.solver.stopping import EXCHANGES, VAIN_EXCHANGES


def take_exchanges(search: Search) -> None:
    """Offer what exchanges make of the best schedule, if there is one."""
    if search.best_state is None:
        return
    search.say("exchanging what is kept")
    exchange(search.best_state, search)


def exchange(state: State, search: Search) -> State:
    """The best schedule that exchanges make of `state`, which fits the budget.

    Each better one is offered to `search`. The greatest saving for its bytes is tried first;
    after a success all are ranked anew.
    """
    limit_bytes = search.budget_bytes
    most_vain = VAIN_EXCHANGES.at(search.problem.n_ops)
    most_work = EXCHANGES.from_now(search.work)
    waiting, in_vain = _worth_carrying(state, search), 0
    while waiting and in_vain < most_vain and search.work < most_work:
        if search.out_of_time():
            break
        _, move = heapq.heappop(waiting)
        twin = state.copy()
        apply(twin, move)
        in_vain += 1
        if not Repair(twin, limit_bytes, 1.0, search, (move.v, move.stage)).run():
            continue
        fill(twin, limit_bytes, search)
        if twin.cost_us < state.cost_us * (1 - 1e-9):
            search.offer(twin)
            state, waiting, in_vain = twin, _worth_carrying(twin, search), 0
    return state


def _worth_carrying(state: State, search: Search) -> list[tuple[float, GapMove]]:
    """Gaps whose carrying saves time, as a heap by time saved for their bytes."""
    nothing = np.zeros_like(state.entry_bytes)
    found: list[tuple[float, GapMove]] = []
    for stage, replayed in enumerate(state.stages):
        for op in replayed.recomputed:
            for v, before in carriable(state, op, stage):
                move = GapMove(v, before, stage, 1)
                trial = try_move(state, move, nothing, 1 << 60)
                search.work += work_of(trial)
                if trial is not None and trial.cost_us < 0:
                    score = trial.cost_us / max(state.problem.size_bytes[v], 1)
                    found.append((score, move))
    heapq.heapify(found)
    return found
