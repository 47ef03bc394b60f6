"""Checkpoints between about √n segments of forward.

Also called: gradient checkpointing, sublinear memory cost.
Paper: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory
Cost", 2016, https://arxiv.org/abs/1604.06174.
Solves: no stated problem; it ignores the budget. Forward is cut into segments of about
equal bytes, at places where few bytes cross; what crosses, what cannot be recomputed and
what the caller holds is kept; a segment is recomputed when backward first reads it, and its
values are freed after their last use. Cost: O(ops + reads).
Optimal up to a constant on uniform chains. Shortcomings: recomputes what would have fitted;
keeps all of a segment at once; blind to op costs; skip connections make checkpoints large.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.solver.chains.places import last_forward_reads
from remat.solver.options import options_of
from remat.solver.problem import Problem
from remat.solver.result import Result, judged
from remat.solver.search import Listener
from remat.solver.segments.segmented import NO_SEGMENT, segmented_state
from remat.solver.state import State


@dataclass(frozen=True)
class ChenSqrt:
    """Solver with one option: how many segments (0: the square root of the forward ops)."""

    segments: int = 0
    time_limit_s: float = 60.0
    progress: Listener | None = None

    def __post_init__(self) -> None:
        if self.segments < 0:
            raise SolverError(f"segments must be 0 (chosen for you) or more, not {self.segments}")

    def schedule(self, graph: TrainingGraph, budget_bytes: int = 0) -> Schedule:
        """The checkpointed schedule of `graph`."""
        state = chen_state(Problem.of(graph), self.segments)
        return state.schedule(
            budget_bytes=budget_bytes, solver="chen_sqrt", options=options_of(self)
        )

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """Judge that schedule against `budget_bytes`; no bound beyond every op once."""
        made = self.schedule(graph, budget_bytes)
        return judged(graph, made, budget_bytes=budget_bytes, lower_bound_us=graph.time_us)


def chen_state(problem: Problem, segments: int = 0) -> State:
    """The state of that schedule; `segments` as in `ChenSqrt`."""
    count = segments or max(1, math.isqrt(problem.n_forward))
    return checkpointed_state(problem, _boundaries(problem, count))


def checkpointed_state(problem: Problem, ends: Sequence[int]) -> State:
    """The state with a checkpoint after each forward op of `ends`, which are ascending."""
    segment = [bisect_left(ends, op) for op in range(problem.n_forward)]
    segment += [NO_SEGMENT] * (problem.n_ops - problem.n_forward)
    return segmented_state(problem, segment, _checkpoints(problem, segment))


def _checkpoint_bytes(problem: Problem) -> list[int]:
    """For each forward op the bytes that later forward ops read from it or before."""
    change = [0] * (problem.n_forward + 1)
    for v, last in enumerate(last_forward_reads(problem)):
        made = problem.producer[v]
        if made < last:
            change[made] += problem.size_bytes[v]
            change[last] -= problem.size_bytes[v]
    return list(accumulate(change))


def _boundaries(problem: Problem, count: int) -> list[int]:
    """Ops after which a segment ends: near equal bytes, where the fewest bytes cross."""
    crossing = _checkpoint_bytes(problem)
    made = list(accumulate(problem.output_bytes[: problem.n_forward]))
    ends: list[int] = []
    for i in range(1, count):
        low = bisect_left(made, made[-1] * (i - 0.4) / count)
        high = bisect_left(made, made[-1] * (i + 0.4) / count)
        places = range(max(low, ends[-1] + 1 if ends else 0), min(high + 1, problem.n_forward))
        if places:
            ends.append(min(places, key=lambda op: (crossing[op], op)))
    return ends


def _checkpoints(problem: Problem, segment: Sequence[int]) -> bytearray:
    """1 for values that stay: they cross, cannot be made again, or the caller holds them."""
    kept = bytearray(problem.n_values)
    for v, last in enumerate(last_forward_reads(problem)):
        op = problem.producer[v]
        crosses = last >= 0 and segment[last] != segment[op]
        kept[v] = op >= problem.n_forward or crosses or problem.pinned[op] or v in problem.held
    return kept
