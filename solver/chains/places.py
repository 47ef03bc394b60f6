"""Where a training graph can be cut into a chain: articulation points, matched by backward.

A place is a point of forward, in captured order, that at most one value crosses. Values that
are kept in any case do not count. Backward must visit the stages between places last to first.
Stages that backward reads interleaved are joined. Cost: linear in ops and reads for each sweep;
joins ask for a few more sweeps.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import NamedTuple

from remat.solver.problem import Problem

SMALL_PART = 0.01
"""A value that is read all along is kept if it is at most this share of what forward makes.

Otherwise one small mask or position table that every layer reads would leave no place to cut.
"""
LONG_PART = 0.25
"""Read all along means: the last read comes more than this share of forward's ops later."""


class Place(NamedTuple):
    """After forward op `end` nothing crosses but `entry` (-1: nothing at all)."""

    end: int
    entry: int


class Split(NamedTuple):
    """Places, and the first backward op of each of the stages between them, in stage order."""

    places: tuple[Place, ...]
    starts: tuple[int, ...]


def kept_values(problem: Problem) -> bytearray:
    """1 for each value that a chain schedule keeps throughout.

    These are values of ops that must not run twice, values in the caller's hands, and small
    values that are read all along.
    """
    kept = bytearray(problem.n_values)
    lasting = {*problem.forward_outputs, *problem.needs[problem.n_ops]}
    small_bytes = SMALL_PART * sum(problem.output_bytes[: problem.n_forward])
    for v, last in enumerate(last_forward_reads(problem)):
        op = problem.producer[v]
        is_long = last - op > LONG_PART * problem.n_forward
        is_small = problem.size_bytes[v] <= small_bytes
        if op < problem.n_forward:
            kept[v] = problem.pinned[op] or v in lasting or (is_long and is_small)
    return kept


def last_forward_reads(problem: Problem) -> list[int]:
    """For each value the last forward op that reads it, -1 if none does."""
    last = [-1] * problem.n_values
    for op in range(problem.n_forward):
        for v in problem.inputs[op]:
            last[v] = op
    return last


def articulation_points(problem: Problem, kept: bytearray) -> list[Place]:
    """All places of forward. Of several that the same value crosses, only the first."""
    crossing = [0] * (problem.n_forward + 1)
    marks = [0] * (problem.n_forward + 1)
    for v, last in enumerate(last_forward_reads(problem)):
        made = problem.producer[v]
        if made < last and not kept[v]:
            for total, change in ((crossing, 1), (marks, v)):
                total[made] += change
                total[last] -= change
    places: list[Place] = []
    counts = zip(accumulate(crossing), accumulate(marks), strict=True)
    for op, (count, mark) in enumerate(counts):
        if count > 1 or op >= problem.n_forward - 1:
            continue
        entry = mark if count else -1
        if entry < 0 or not places or places[-1].entry != entry:
            places.append(Place(op, entry))
    return places


def coarsened(problem: Problem, places: list[Place], most_stages: int) -> list[Place]:
    """At most `most_stages - 1` places, for stages of about equal bytes and time.

    Of the places near a cut, the one that the smallest value crosses is taken.
    """
    if len(places) < most_stages:
        return places
    total_bytes = sum(problem.output_bytes[: problem.n_forward]) or 1
    total_us = sum(problem.cost_us[: problem.n_forward]) or 1.0
    parts = zip(problem.output_bytes, problem.cost_us, strict=True)
    done = list(accumulate(b / total_bytes + t / total_us for b, t in parts))
    smallest: dict[int, tuple[int, Place]] = {}
    for place in places:
        window = min(int(done[place.end] / 2 * (most_stages - 1)), most_stages - 2)
        size_bytes = problem.size_bytes[place.entry] if place.entry >= 0 else 0
        if window not in smallest or size_bytes < smallest[window][0]:
            smallest[window] = size_bytes, place
    return [place for _, place in smallest.values()]


def split_by_backward(problem: Problem, kept: bytearray, places: list[Place]) -> Split:
    """The places at which backward can be split too; empty if there are none."""
    while True:
        stage_of_op, joined = _sweep(problem, kept, places)
        left = [place for place, is_joined in zip(places, joined, strict=True) if not is_joined]
        if len(left) == len(places):
            falling = [-stage for stage in stage_of_op]
            first = (bisect_left(falling, -stage) for stage in range(len(places) + 1))
            return Split(tuple(places), tuple(problem.n_forward + i for i in first))
        places = left


def _sweep(problem: Problem, kept: bytearray, places: list[Place]) -> tuple[list[int], list[bool]]:
    """The stage of each backward op, which never rises, and which places have to be joined."""
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
                lowest, highest = max(lowest, here), min(highest, here + (v in crossing))
        current = highest
        assigned.append(current)
        if lowest > current:
            joins[current] += 1
            joins[lowest] -= 1
    return assigned, [count > 0 for count in accumulate(joins[: len(places)])]
