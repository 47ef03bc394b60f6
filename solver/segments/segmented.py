"""The schedule of forward cut into segments: what each brings back, and when."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from remat.solver.problem import Problem
from remat.solver.stage import recomputed_in
from remat.solver.state import State

NO_SEGMENT = -1
"""Of ops that never run again, those of backward among them."""

Read = tuple[int, int]
"""A stage of backward, and a value that it reads."""


def segmented_state(problem: Problem, segment: Sequence[int], kept: bytes | bytearray) -> State:
    """The state that runs a segment again, as a whole, when backward first reads from it.

    Parameters
    ----------
    segment : of each op, from 0 on, or `NO_SEGMENT`.
    kept : 1 for each value that stays until its last use: what is not made in forward, what
        cannot be made again, and what the segments are to keep.
    """
    available = bytearray(kept)
    reads = _reads_by_segment(problem, segment)
    recomputed: list[list[int]] = [[] for _ in range(problem.n_forward)]
    for t in range(problem.n_forward, problem.n_ops + 1):
        gone = [v for v in problem.needs[t] if not available[v]]
        reached = dict.fromkeys(segment[problem.producer[v]] for v in gone)
        wanted = dict.fromkeys(v for s in reached for v in _read_from(reads[s], t))
        recomputed.append(recomputed_in(problem, available, list(wanted), t, own_needs=False))
        for op in recomputed[-1]:
            for v in problem.outputs[op]:
                available[v] = 1
    return State.from_recomputed(problem, recomputed)


def _reads_by_segment(problem: Problem, segment: Sequence[int]) -> list[list[Read]]:
    """For each segment what backward, or the end of the step, reads of it, by stage."""
    reads: list[list[Read]] = [[] for _ in range(max(segment, default=NO_SEGMENT) + 1)]
    for stage in range(problem.n_forward, problem.n_ops + 1):
        for v in problem.needs[stage]:
            if segment[problem.producer[v]] != NO_SEGMENT:
                reads[segment[problem.producer[v]]].append((stage, v))
    return reads


def _read_from(reads: Sequence[Read], t: int) -> list[int]:
    """The values of `reads` that stage t or a later one reads."""
    return [v for _, v in reads[bisect_left(reads, (t, -1)) :]]
