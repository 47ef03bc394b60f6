"""Staged events, and a schedule as retention intervals over them, for `retention_model`.

Time is a sequence of events. In stage t any earlier op may run again, in captured order; then
op t has its first run. The last event is the end of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from remat.solver.problem import Problem
from remat.solver.sequence import recomputed_by_stage

Stages = list[list[int]]
"""For each op the stages in which it runs, beginning with that of its first run."""
FORWARD_END, STEP_END = -1, -2
"""They stand for an op: the one that uses forward outputs, and the one that uses the step's."""


def event_of(stage: int, op: int) -> int:
    """Number of the event at which `op` runs in `stage`."""
    return stage * (stage + 1) // 2 + op


def last_stages(problem: Problem) -> list[int]:
    """For each op the last stage in which another run of it can be of use; its own if none."""
    last = list(range(problem.n_ops))
    for op in reversed(range(problem.n_ops)):
        if not problem.pinned[op]:
            for reader in problem.readers[op]:
                last[op] = max(last[op], reader if reader == problem.n_ops else last[reader])
    return last


def stage_of(event: int, op: int) -> int:
    """The stage of an event at which `op` runs: the inverse of `event_of`."""
    return (math.isqrt(8 * (event - op) + 1) - 1) // 2


def sequence_of_stages(problem: Problem, stages: Stages) -> list[int]:
    """The ops in the order in which they run."""
    runs = [(event_of(stage, op), op) for op, times in enumerate(stages) for stage in times]
    return [op for _, op in sorted(runs)]


def stages_of_runs(problem: Problem, sequence: Sequence[int]) -> Stages:
    """Where each op runs in `sequence`, whose first runs are in captured order."""
    stages: Stages = [[op] for op in range(problem.n_ops)]
    for stage, again in enumerate(recomputed_by_stage(problem, sequence)):
        for op in dict.fromkeys(again):
            stages[op].append(stage)
    return stages


@dataclass(frozen=True, slots=True)
class Shown:
    """A schedule as intervals: which run each use reads, and when each run is last read.

    Attributes
    ----------
    used : (op, its run, value) to the run that made what it reads.
    end : for each value and each run of its producer, the event of the last use.
    """

    used: dict[tuple[int, int, int], int]
    end: list[list[int]]


def shown_by(problem: Problem, stages: Stages) -> Shown:
    """The intervals of the schedule with those stages; each use reads the latest run."""
    used: dict[tuple[int, int, int], int] = {}
    end = [[event_of(t, op) for t in stages[op]] for op in problem.producer]
    latest = [-1] * problem.n_ops
    handed: dict[int, int] = {}
    runs = [(event_of(t, op), op, i) for op, at in enumerate(stages) for i, t in enumerate(at)]

    def use(op: int, i: int, v: int, event: int) -> None:
        j = used[op, i, v] = handed.get(v, latest[problem.producer[v]])
        end[v][j] = max(end[v][j], event)

    for event, op, i in sorted(runs):
        for v in problem.inputs[op]:
            use(op, i, v, event)
        latest[op] = i
        if op == problem.n_forward - 1 and i == 0:
            for v in problem.forward_outputs:
                use(FORWARD_END, 0, v, event)
            handed = {v: latest[problem.producer[v]] for v in sorted(problem.held)}
    last = event_of(problem.n_ops, problem.n_ops)
    for v in problem.needs[problem.n_ops]:
        use(STEP_END, 0, v, last)
    return Shown(used, end)
