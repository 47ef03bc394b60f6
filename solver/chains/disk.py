"""Two levels of storage for a chain schedule: the states least read go to the host.

Source: P. Stumm, A. Walther, "MultiStage Approaches for Optimal Offline Checkpointing",
2009, https://doi.org/10.1137/080718036: each slot keeps its level for the whole run, and
the slots that are written and read most stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.solver.chains.chain import Action, Chain, ops_of_actions
from remat.solver.problem import Problem


class Stored(NamedTuple):
    """A state in a slot.

    `position` is that of the action that stores it. `reads` counts how often forward starts
    again from it.
    """

    position: int
    stage: int
    slot: int
    reads: int


def stored_states(actions: Sequence[Action]) -> list[Stored]:
    """Each state that `actions` store, in order.

    Slots are a stack: the last one taken is the first one left. Saved stages take slots too.
    """
    slots: list[int | None] = []
    found: list[Stored] = []
    reached = 0
    for position, ((kind, stage), after) in enumerate(pairwise((*actions, Action("discard", -1)))):
        if kind == "store":
            found.append(Stored(position, stage, len(slots), 0))
            slots.append(len(found) - 1)
        elif kind == "discard":
            slots.pop()
            reached = stage
        elif kind == "backward":
            if slots and slots[-1] is None and reached != stage + 1:
                slots.pop()
        else:
            for index in slots:
                if index is not None and stage == found[index].stage != reached:
                    found[index] = found[index]._replace(reads=found[index].reads + 1)
            reached = stage + 1
            if kind == "save" and after != Action("backward", stage):
                slots.append(None)
    return found


def least_read(states: Sequence[Stored], count: int) -> list[Stored]:
    """The states of the `count` slots that are written and read least.

    The first slot is left out: what enters the first stage is resident.
    """
    accesses: dict[int, int] = {}
    for state in states:
        accesses[state.slot] = accesses.get(state.slot, 0) + 1 + state.reads
    accesses.pop(0, None)
    chosen = sorted(accesses, key=lambda slot: (accesses[slot], slot))[:count]
    return [state for state in states if state.slot in chosen]


def with_disk(
    problem: Problem, chain: Chain, made: Schedule, actions: Sequence[Action], count: int
) -> Schedule:
    """`made` from `actions`, with the states of `count` slots offloaded while they wait."""
    chosen = least_read(stored_states(actions), count)
    runs = ops_of_actions(chain, actions)
    making: dict[str, list[int]] = {}
    for state in chosen:
        entry = chain.stages[state.stage].entry
        if entry >= 0:
            op = problem.producer[entry]
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
    """The pairs of uses between which the value waits while other ops run.

    `making` says after which of its makings, counted from 1; after others it stays.
    """
    graph = problem.graph
    producer, times, last_use, worked = graph.value_by_name[name].producer, 0, -1, False
    found: list[tuple[int, int]] = []
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
