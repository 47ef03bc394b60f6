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
from remat.solver.problem import Problem
from remat.solver.result import Result, judged
from remat.solver.search import Listener
from remat.solver.stage import recomputed_in
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

    def schedule(self, graph: TrainingGraph) -> Schedule:
        """The checkpointed schedule of `graph`."""
        return chen_state(Problem.of(graph), self.segments).schedule(solver="chen_sqrt")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """Judge that schedule against `budget_bytes`; no bound beyond every op once."""
        made = chen_state(Problem.of(graph), self.segments)
        return judged(
            graph,
            made.schedule(budget_bytes=budget_bytes, solver="chen_sqrt"),
            budget_bytes=budget_bytes,
            lower_bound_us=graph.time_us,
        )


def chen_state(problem: Problem, segments: int = 0) -> State:
    """The state of that schedule; `segments` as in `ChenSqrt`."""
    count = segments or max(1, math.isqrt(problem.n_forward))
    return segmented_state(problem, _boundaries(problem, count))


def segmented_state(problem: Problem, ends: Sequence[int]) -> State:
    """The state with a checkpoint after each forward op of `ends`, which are ascending."""
    segment = _segment_of(problem, ends)
    available = _kept(problem, segment)
    reads = _late_reads(problem, segment)
    recomputed: list[list[int]] = []
    for t in range(problem.n_ops + 1):
        recomputed.append(_recomputed_at(problem, segment, available, reads, t))
        for op in (*recomputed[-1], t) if t < problem.n_ops else recomputed[-1]:
            if op >= problem.n_forward or t >= problem.n_forward:
                for v in problem.outputs[op]:
                    available[v] = 1
    return State.from_recomputed(problem, recomputed)


def _crossing_bytes(problem: Problem) -> list[int]:
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
    crossing = _crossing_bytes(problem)
    made = list(accumulate(problem.output_bytes[: problem.n_forward]))
    ends: list[int] = []
    for i in range(1, count):
        low = bisect_left(made, made[-1] * (i - 0.4) / count)
        high = bisect_left(made, made[-1] * (i + 0.4) / count)
        places = range(max(low, ends[-1] + 1 if ends else 0), min(high + 1, problem.n_forward))
        if places:
            ends.append(min(places, key=lambda op: (crossing[op], op)))
    return ends


def _segment_of(problem: Problem, ends: Sequence[int]) -> list[int]:
    return [bisect_left(ends, op) for op in range(problem.n_forward)]


def _kept(problem: Problem, segment: Sequence[int]) -> bytearray:
    """1 for values that stay: they cross, cannot be made again, or the caller holds them."""
    kept = bytearray(problem.n_values)
    for v, last in enumerate(last_forward_reads(problem)):
        op = problem.producer[v]
        crosses = op < problem.n_forward and last >= 0 and segment[last] != segment[op]
        if crosses or problem.pinned[op] or v in problem.held:
            kept[v] = 1
    return kept


def _late_reads(problem: Problem, segment: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For each segment the values that stages after forward read of it, with the stage."""
    reads: list[list[tuple[int, int]]] = [[] for _ in range(max(segment, default=-1) + 1)]
    for stage in range(problem.n_forward, problem.n_ops + 1):
        for v in problem.needs[stage]:
            if problem.producer[v] < problem.n_forward:
                reads[segment[problem.producer[v]]].append((stage, v))
    return reads


def _recomputed_at(
    problem: Problem,
    segment: Sequence[int],
    available: bytearray,
    reads: Sequence[list[tuple[int, int]]],
    t: int,
) -> list[int]:
    """Of each segment that stage t reads and that is gone: all that backward reads of it."""
    if t < problem.n_forward:
        return []
    gone = [v for v in problem.needs[t] if not available[v]]
    if not gone:
        return []
    reached = dict.fromkeys(segment[problem.producer[v]] for v in gone)
    late = sorted(read for s in reached for read in reads[s][bisect_left(reads[s], (t, -1)) :])
    wanted = dict.fromkeys(v for _, v in late)
    return recomputed_in(problem, available, list(wanted), t, own_needs=False)
