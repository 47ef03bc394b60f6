"""Optimal schedules of uniform chains: binomial checkpointing, and with mixed checkpoints.

Sources: A. Griewank, A. Walther, "Algorithm 799: Revolve", 2000,
https://doi.org/10.1145/347837.347846, for slots that hold the state before a stage;
J. R. Maddison, "Step-based checkpointing with high-level algorithmic differentiation", 2024,
https://arxiv.org/abs/2305.09568, for slots that may hold what backward reads of a stage
instead. Counts are forward runs of stages in the whole step. The state before the first stage
takes a slot if it is read again.
"""

from __future__ import annotations

from math import comb

import numpy as np
import numpy.typing as npt

from remat.graph_capture.errors import SolverError
from remat.solver.chains.chain import Action

Counts = npt.NDArray[np.int64]
NEVER = 1 << 60
"""The count of what cannot be done."""


def repetitions(stages: int, slots: int) -> int:
    """The least t with C(s + t, s) ≥ n: no stage need run more than t times again."""
    times = 0
    while comb(slots + times, slots) < stages:
        times += 1
    return times


def _check(stages: int, slots: int, least_slots: int) -> None:
    if stages < 1 or slots < least_slots:
        raise SolverError(
            f"a chain has 1 stage or more and {least_slots} or more slots, "
            f"not {stages} stages and {slots} slots"
        )


def _right_start(stages: int, slots: int) -> int:
    """How many stages to advance before the next state is stored.

    The left part must do with one repetition less and the same slots. The right part must do
    with the same repetitions and one slot less. Any split that allows both is optimal.
    """
    times = repetitions(stages, slots)
    left_most = comb(slots + times - 1, slots)
    right_least = comb(slots + times - 2, slots - 1)
    return max(1, min(left_most, stages - right_least))


def binomial_actions(stages: int, slots: int) -> list[Action]:
    """A schedule of the fewest forward runs with `slots` states stored.

    Their number is n + t·n - C(s + t, t - 1), with t from `repetitions`.

    Raises
    ------
    SolverError : no stage, or no slot for the first state.
    """
    _check(stages, slots, least_slots=1)
    found, stored = [Action("store", 0)], {0}
    waiting = [(0, stages, slots)]
    while waiting:
        start, count, free = waiting.pop()
        if count == 1:
            found += [Action("save", start), Action("backward", start)]
            if start in stored:
                stored.discard(start)
                found.append(Action("discard", start))
            continue
        ahead = _right_start(count, free)
        found += [Action("forward", start + i) for i in range(ahead)]
        if count - ahead > 1:
            stored.add(start + ahead)
            found.append(Action("store", start + ahead))
        waiting += [(start, ahead, free), (start + ahead, count - ahead, free - 1)]
    return found


def mixed_table(stages: int, slots: int) -> tuple[Counts, Counts]:
    """Fewest forward runs for [slots, stages], and the first choice.

    Choice 0: save what backward reads of the first stage; k > 0: store the state before it
    and run k stages forward.
    """
    steps = np.full((slots + 1, stages + 1), NEVER, np.int64)
    choice = np.zeros((slots + 1, stages + 1), np.int64)
    steps[:, 0], steps[:, 1] = 0, 1
    for held in range(1, slots + 1):
        for n in range(2, stages + 1):
            steps[held, n] = 1 + steps[held - 1, n - 1]
            ahead = np.arange(1, n)
            totals = ahead + steps[held, 1:n] + steps[held - 1, n - 1 : 0 : -1]
            k = int(totals.argmin())
            if totals[k] < steps[held, n]:
                steps[held, n], choice[held, n] = totals[k], k + 1
    return np.minimum(steps, NEVER), choice


def mixed_actions(stages: int, slots: int) -> list[Action]:
    """A schedule of the fewest forward runs where a slot holds a state, or what backward reads.

    Raises
    ------
    SolverError : no stage, or more than one and no slot.
    """
    _check(stages, slots, least_slots=1 if stages > 1 else 0)
    slots = min(slots, stages)
    choice = mixed_table(stages, slots)[1]
    found: list[Action] = []
    waiting = [(0, stages, slots)]
    while waiting:
        start, count, free = waiting.pop()
        if count < 0:
            found.append(Action("backward" if count == -1 else "discard", start))
        elif (ahead := int(choice[free, count])) == 0:
            found.append(Action("save", start))
            waiting.append((start, -1, 0))
            if count > 1:
                waiting.append((start + 1, count - 1, free - 1))
        else:
            found.append(Action("store", start))
            found += [Action("forward", start + i) for i in range(ahead)]
            waiting += [(start, ahead, free), (start, -2, 0)]
            waiting.append((start + ahead, count - ahead, free - 1))
    return found
