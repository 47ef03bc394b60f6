"""Binomial checkpointing on the stages of a chain, as if all were alike.

Also called: revolve, treeverse, multistage checkpointing (with `disk_slots`), mixed
checkpointing (with `mixed`).
Paper: A. Griewank, A. Walther, "Algorithm 799: Revolve", 2000,
https://doi.org/10.1145/347837.347846; P. Stumm, A. Walther, "MultiStage Approaches for
Optimal Offline Checkpointing", 2009, https://doi.org/10.1137/080718036; J. R. Maddison,
"Step-based checkpointing with high-level algorithmic differentiation", 2024,
https://arxiv.org/abs/2305.09568.
Solves: fewest forward runs of stages on a uniform chain with a number of slots for states.
The graph is cut into stages at its articulation points. The greatest number of slots whose
schedule fits is found by bisection; the fastest schedule is filled with what still fits.
Optimal: on chains whose stages are alike in time and bytes (`binomial` counts the runs).
Cost: O(stages · repetitions); `mixed` O(stages² · slots).
Shortcomings: takes chains only; blind to times and sizes; runs a stage's forward again right
before its backward even where there is room, unless the fill carries its values.
With `disk_slots` each state leaves right after its last use and comes right before its next, so
the device waits for every copy, and nothing is filled: `joint` places copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from remat.graph_capture.errors import SolverError, option
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.solver.problem import Problem
from remat.solver.search import Listener, Search, check_least
from remat.solver.segments.chain import (
    Chain,
    ChainAction,
    ChainSearch,
    ops_of_actions,
    solve_on_chain,
)

_Counts = npt.NDArray[np.int64]
_NEVER = 1 << 60  # the count of what cannot be done


# Counts are forward runs of stages in the whole step. The state before the first stage takes a slot
# if it is read again.
def _repetitions(stages: int, slots: int) -> int:
    """The least t with C(s + t, s) ≥ n: no stage need run more than t times again."""
    times = 0
    while comb(slots + times, slots) < stages:
        times += 1
    return times


def _check_slots(stages: int, slots: int, least_slots: int) -> None:
    if stages < 1 or slots < least_slots:
        raise SolverError(
            f"a chain has 1 stage or more and {least_slots} or more slots, "
            f"not {stages} stages and {slots} slots"
        )


def _right_start(stages: int, slots: int) -> int:
    """How many stages to advance before the next state is stored."""
    times = _repetitions(stages, slots)
    # The left part has one repetition less and all slots; the right part has all repetitions and
    # one slot less.
    left_most = comb(slots + times - 1, slots)
    right_least = comb(slots + times - 2, slots - 1)
    return max(1, min(left_most, stages - right_least))  # every such split is optimal


def binomial_actions(stages: int, slots: int) -> list[ChainAction]:
    """Fewest forward runs with `slots` states: n + t·n - C(s + t, t - 1), t of `_repetitions`."""
    _check_slots(stages, slots, least_slots=1)
    found, stored = [ChainAction("store", 0)], {0}
    waiting = [(0, stages, slots)]
    while waiting:
        start, count, free = waiting.pop()
        if count == 1:
            # A single stage: save what its backward reads, and run that at once.
            found += [ChainAction("save", start), ChainAction("backward", start)]
            if start in stored:
                stored.discard(start)
                found.append(ChainAction("discard", start))
            continue
        ahead = _right_start(count, free)
        found += [ChainAction("forward", start + i) for i in range(ahead)]
        # A part of one stage is saved and used at once, so its state needs no slot.
        if count - ahead > 1:
            stored.add(start + ahead)
            found.append(ChainAction("store", start + ahead))
        # A stack: the right part is popped first, since backward starts there.
        waiting += [(start, ahead, free), (start + ahead, count - ahead, free - 1)]
    return found


def mixed_table(stages: int, slots: int) -> tuple[_Counts, _Counts]:
    """Fewest forward runs for [slots, stages], and the first choice."""
    # Choice 0: save what backward reads of the first stage; k > 0: store the state before it, and
    # run k stages forward.
    steps = np.full((slots + 1, stages + 1), _NEVER, np.int64)
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
    # Impossible counts may have been added up.
    return np.minimum(steps, _NEVER), choice


def mixed_actions(stages: int, slots: int) -> list[ChainAction]:
    """The fewest forward runs where a slot holds a state, or what backward reads."""
    _check_slots(stages, slots, least_slots=1 if stages > 1 else 0)
    slots = min(slots, stages)  # more slots are of no use
    choice = mixed_table(stages, slots)[1]
    found: list[ChainAction] = []
    waiting = [(0, stages, slots)]
    while waiting:
        start, count, free = waiting.pop()
        # Left to do after the stages behind it: -1 is its backward, -2 empties its slot.
        if count < 0:
            found.append(ChainAction("backward" if count == -1 else "discard", start))
        elif (ahead := int(choice[free, count])) == 0:
            found.append(ChainAction("save", start))
            waiting.append((start, -1, 0))
            if count > 1:
                waiting.append((start + 1, count - 1, free - 1))
        else:
            found.append(ChainAction("store", start))
            found += [ChainAction("forward", start + i) for i in range(ahead)]
            waiting += [(start, ahead, free), (start, -2, 0)]
            waiting.append((start + ahead, count - ahead, free - 1))
    return found


# Stumm and Walther 2009: each slot keeps its level for the whole run, and the slots that are
# written and read most stay in memory.
class _Stored(NamedTuple):
    """A state that the action at `position` stores, and from which forward starts `reads` times."""

    position: int
    stage: int
    slot: int
    reads: int


def stored_states(actions: Sequence[ChainAction]) -> list[_Stored]:
    # Slots are a stack: the last one filled is the first one emptied. Saved stages take slots too.
    slots: list[int | None] = []
    found: list[_Stored] = []
    reached = 0
    following = pairwise((*actions, ChainAction("discard", -1)))
    for position, ((kind, stage), after) in enumerate(following):
        if kind == "store":
            found.append(_Stored(position, stage, len(slots), 0))
            slots.append(len(found) - 1)
        elif kind == "discard":
            slots.pop()
            reached = stage
        elif kind == "backward":
            # A stage saved right before its backward took no slot.
            if slots and slots[-1] is None and reached != stage + 1:
                slots.pop()
        else:
            for index in slots:
                # Forward restarts from this state, unless it just went on from the stage before.
                if index is not None and stage == found[index].stage != reached:
                    found[index] = found[index]._replace(reads=found[index].reads + 1)
            reached = stage + 1
            if kind == "save" and after != ChainAction("backward", stage):
                slots.append(None)
    return found


def least_read(states: Sequence[_Stored], count: int) -> list[_Stored]:
    """The states of the `count` slots that are written and read least."""
    accesses: dict[int, int] = {}
    for state in states:
        accesses[state.slot] = accesses.get(state.slot, 0) + 1 + state.reads
    # The state before the first stage is resident.
    accesses.pop(0, None)
    chosen = sorted(accesses, key=lambda slot: (accesses[slot], slot))[:count]
    return [state for state in states if state.slot in chosen]


def _with_disk(
    problem: Problem, chain: Chain, made: Schedule, actions: Sequence[ChainAction], count: int
) -> Schedule:
    chosen = least_read(stored_states(actions), count)
    runs = ops_of_actions(chain, actions)
    making: dict[str, list[int]] = {}
    for state in chosen:
        entry = chain.stages[state.stage].entry
        # No op makes what enters the first stage.
        if entry >= 0:
            op = problem.producer[entry]
            # A state may be made several times, and waits on the host only after some of them.
            times = sum(op in run for run in runs[: state.position])
            making.setdefault(problem.names[entry], []).append(times)
    before: dict[int, list[Step]] = {}
    after: dict[int, list[Step]] = {}
    for name, times in making.items():
        for first, following in _waits(problem, made.steps, name, times):
            after.setdefault(first, []).extend((Offload(name), Free(name)))
            before.setdefault(following, []).extend((Fetch(name), Free(name, "host")))
    steps: list[Step] = []
    for position, step in enumerate(made.steps):
        steps += [*before.get(position, ()), step, *after.get(position, ())]
    return msgspec.structs.replace(made, steps=tuple(steps))


def _waits(
    problem: Problem, steps: Sequence[Step], name: str, making: Iterable[int]
) -> list[tuple[int, int]]:
    graph = problem.graph
    producer, times, last_use, worked = graph.value_by_name[name].producer, 0, -1, False
    found: list[tuple[int, int]] = []
    # The makings after which it waits on the host, counted from 1.
    wanted = set(making)
    for position, step in enumerate(steps):
        if isinstance(step, Free):
            last_use = -1 if step.value == name else last_use
            continue
        if not isinstance(step, Compute):
            continue
        op = graph.ops[graph.op_index[step.op]]
        if op.name == producer or name in op.inputs:
            times += op.name == producer
            if last_use >= 0 and worked and times in wanted:
                found.append((last_use, position))
            last_use, worked = position, False
        else:
            worked = True
    return found


@dataclass(frozen=True)
class Revolve:
    """Solver for chains of stages that are alike.

    Attributes
    ----------
    slots : how many states are stored (0: as many as fit).
    disk_slots : how many of those wait in host memory; the least read ones do.
    mixed : a slot may hold what backward reads of a stage instead of a state.
    stages : the most stages.
    time_limit_s, progress : as in `remat.solver.solve_within`.
    """

    slots: int = 0
    disk_slots: int = 0
    mixed: bool = False
    stages: int = 128
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        if self.slots < 0:
            raise SolverError(f"slots must be 0 (chosen for you) or more, not {self.slots}")
        check_least(0, disk_slots=self.disk_slots)
        check_least(2, stages=self.stages)

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        if self.disk_slots and graph.links is None:
            raise SolverError(
                f"capture with {option('host', '64GiB')}: disk_slots needs a link to the host"
            )
        search = Search.of(self, "revolve", graph, budget_bytes)
        return solve_on_chain(search, self.stages, self._solve_chain)

    def _solve_chain(self, search: Search, chain: Chain) -> None:
        length = len(chain.stages)

        def change(made: Schedule, actions: Sequence[ChainAction]) -> Schedule:
            return _with_disk(search.problem, chain, made, actions, self.disk_slots)

        tries = ChainSearch(search, chain, change if self.disk_slots else None)
        search.say(f"chain of {length} stages")
        if self.slots:
            tries.fits(self._actions(length, min(self.slots, length)))  # more slots are of no use
        else:
            tries.try_rising(lambda choice: self._actions(length, choice + 1), length)
        if not self.disk_slots:
            tries.fill_best()

    def _actions(self, length: int, slots: int) -> list[ChainAction]:
        return (mixed_actions if self.mixed else binomial_actions)(length, slots)
