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
from typing import NamedTuple

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.schedule import Schedule
from remat.solver.problem import Problem, bytes_across
from remat.solver.result import evaluate_schedule
from remat.solver.search import Listener
from remat.solver.state import State, mark_made, recomputed_in
from remat.solver.table import options_of

# A place is a point of forward that at most one value crosses, apart from what is kept in any case.
# Backward must visit the stages between last to first; those that it reads interleaved are joined.
# Cost: linear for each sweep; joins ask for a few more.

# Kept up to this share of forward's bytes if read all along: a mask would leave no place to cut.
_SMALL_PART = 0.01
_LONG_PART = 0.25  # all along: the last read is more than this share of forward's ops later


class _ArticulationPoint(NamedTuple):
    """After forward op `end` nothing crosses but `entry` (-1: nothing at all)."""

    end: int
    entry: int


class StageSplit(NamedTuple):
    """Places, and the first backward op of each stage between, in stage order."""

    places: tuple[_ArticulationPoint, ...]
    starts: tuple[int, ...]


def kept_values(problem: Problem) -> bytearray:
    """1 for each value that a chain schedule keeps throughout."""
    kept = bytearray(problem.n_values)
    lasting = {*problem.forward_outputs, *problem.needs[problem.n_ops]}
    small_bytes = _SMALL_PART * sum(problem.output_bytes[: problem.n_forward])
    for v, last in enumerate(problem.last_forward_read):
        op = problem.producer[v]
        is_long = last - op > _LONG_PART * problem.n_forward
        is_small = problem.size_bytes[v] <= small_bytes
        if op < problem.n_forward:
            kept[v] = problem.no_recompute[op] or v in lasting or (is_long and is_small)
    return kept


def articulation_points(problem: Problem, kept: bytearray) -> list[_ArticulationPoint]:
    """Of several that the same value crosses, only the first."""
    crossing = [0] * (problem.n_forward + 1)
    marks = [0] * (problem.n_forward + 1)  # where one value crosses, the sum is its number
    for v, last in enumerate(problem.last_forward_read):
        made = problem.producer[v]
        if made < last and not kept[v]:
            for total, change in ((crossing, 1), (marks, v)):
                total[made] += change
                total[last] -= change
    places: list[_ArticulationPoint] = []
    counts = zip(accumulate(crossing), accumulate(marks), strict=True)
    for op, (count, mark) in enumerate(counts):
        if count > 1 or op >= problem.n_forward - 1:
            continue
        entry = mark if count else -1
        if entry < 0 or not places or places[-1].entry != entry:
            places.append(_ArticulationPoint(op, entry))
    return places


def coarsened(
    problem: Problem, places: list[_ArticulationPoint], most_stages: int
) -> list[_ArticulationPoint]:
    """At most `most_stages - 1` places, for stages of about equal bytes and time."""
    if len(places) < most_stages:
        return places
    total_bytes = sum(problem.output_bytes[: problem.n_forward]) or 1
    total_us = sum(problem.cost_us[: problem.n_forward]) or 1.0
    parts = zip(problem.output_bytes, problem.cost_us, strict=True)
    done = list(accumulate(b / total_bytes + t / total_us for b, t in parts))
    smallest: dict[int, tuple[int, _ArticulationPoint]] = {}
    for place in places:
        window = min(int(done[place.end] / 2 * (most_stages - 1)), most_stages - 2)
        size_bytes = problem.size_bytes[place.entry] if place.entry >= 0 else 0
        # Near a cut, the one that the smallest value crosses.
        if window not in smallest or size_bytes < smallest[window][0]:
            smallest[window] = size_bytes, place
    return [place for _, place in smallest.values()]


def split_by_backward(
    problem: Problem, kept: bytearray, places: list[_ArticulationPoint]
) -> StageSplit:
    """The places at which backward can be split too; empty if there are none."""
    while True:
        stage_of_op, joined = _sweep(problem, kept, places)
        left = [place for place, is_joined in zip(places, joined, strict=True) if not is_joined]
        if len(left) == len(places):
            falling = [-stage for stage in stage_of_op]  # `bisect_left` takes what never falls
            first = (bisect_left(falling, -stage) for stage in range(len(places) + 1))
            return StageSplit(tuple(places), tuple(problem.n_forward + i for i in first))
        places = left


def _sweep(
    problem: Problem, kept: bytearray, places: list[_ArticulationPoint]
) -> tuple[list[int], list[bool]]:
    """The stage of each backward op, never rising, and which places to join."""
    ends = [place.end for place in places]
    stage = [bisect_left(ends, op) for op in range(problem.n_forward)]
    crossing = {place.entry for place in places}
    current, assigned = len(places), list[int]()
    joins = [0] * (len(places) + 1)
    for op in range(problem.n_forward, problem.n_ops):
        lowest, highest = 0, current
        for v in problem.inputs[op]:
            if problem.producer[v] < problem.n_forward and not kept[v]:
                here = stage[problem.producer[v]]
                # What crosses a place is at hand behind it too.
                lowest, highest = max(lowest, here), min(highest, here + (v in crossing))
        current = highest
        assigned.append(current)
        if lowest > current:
            joins[current] += 1
            joins[lowest] -= 1
    return assigned, [count > 0 for count in accumulate(joins[: len(places)])]


NO_SEGMENT = -1  # of ops that never run again, those of backward among them


def segmented_state(problem: Problem, segment: Sequence[int], kept: bytes | bytearray) -> State:
    """A segment runs again, as a whole, when backward first reads from it."""
    available = bytearray(kept)  # stays: what is not of forward, cannot be made again, or is kept
    # By segment what backward or the end reads: stages and values.
    reads: list[list[tuple[int, int]]] = [[] for _ in range(max(segment, default=NO_SEGMENT) + 1)]
    for stage in range(problem.n_forward, problem.n_ops + 1):
        for v in problem.needs[stage]:
            if segment[problem.producer[v]] != NO_SEGMENT:
                reads[segment[problem.producer[v]]].append((stage, v))
    recomputed: list[list[int]] = [[] for _ in range(problem.n_forward)]
    for t in range(problem.n_forward, problem.n_ops + 1):
        gone = [v for v in problem.needs[t] if not available[v]]
        reached = dict.fromkeys(segment[problem.producer[v]] for v in gone)
        wanted = dict.fromkeys(  # what this stage or a later one reads
            v for s in reached for _, v in reads[s][bisect_left(reads[s], (t, -1)) :]
        )
        recomputed.append(recomputed_in(problem, available, list(wanted), t, own_needs=False))
        mark_made(problem, available, recomputed[-1])
    return State.from_recomputed(problem, recomputed)


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
        state = chen_state(Problem.of(graph), self.segments)
        return state.schedule(
            budget_bytes=budget_bytes, solver="chen_sqrt", options=options_of(self)
        )

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        made = self.schedule(graph, budget_bytes)
        return evaluate_schedule(
            graph, made, budget_bytes=budget_bytes, lower_bound_us=graph.time_us
        )


def chen_state(problem: Problem, segments: int = 0) -> State:
    count = segments or max(1, math.isqrt(problem.n_forward))
    return checkpointed_state(problem, _boundaries(problem, count))


def checkpointed_state(problem: Problem, ends: Sequence[int]) -> State:
    """The state with a checkpoint after each forward op of `ends`, which are ascending."""
    segment = [bisect_left(ends, op) for op in range(problem.n_forward)]
    segment += [NO_SEGMENT] * (problem.n_ops - problem.n_forward)
    # 1 for values that stay: they cross, cannot be made again, or the caller holds them.
    kept = bytearray(problem.n_values)
    for v, last in enumerate(problem.last_forward_read):
        op = problem.producer[v]
        crosses = last >= 0 and segment[last] != segment[op]
        must_stay = problem.no_recompute[op] or v in problem.held
        kept[v] = op >= problem.n_forward or crosses or must_stay
    return segmented_state(problem, segment, kept)


def _boundaries(problem: Problem, count: int) -> list[int]:
    """Ops after which a segment ends: near equal bytes, where the fewest bytes cross."""
    crossing = bytes_across(problem, problem.last_forward_read, range(problem.n_forward))
    made = list(accumulate(problem.output_bytes[: problem.n_forward]))
    ends: list[int] = []
    for i in range(1, count):
        low = bisect_left(made, made[-1] * (i - 0.4) / count)  # neighbouring windows do not meet
        high = bisect_left(made, made[-1] * (i + 0.4) / count)
        places = range(max(low, ends[-1] + 1 if ends else 0), min(high + 1, problem.n_forward))
        if places:
            ends.append(min(places, key=lambda op: (crossing[op + 1], op)))
    return ends
