"""Repeated blocks of a training graph, found by structure and not by names.

A graph need not have module names. (Templates ask them, since people wrap modules.) Each forward op
has a class: its target, cost and sizes. The longest run of ops whose classes repeat is cut where
the fewest bytes cross, and what lies around it is searched again. A block gets the backward ops
from the last that reads anything behind it to the last that reads its own values. Cost:
near-linear. Shortcomings: a block whose ops are interleaved with others is missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from remat.graph_capture.graph import Ints
from remat.solver.problem import Problem, bytes_across

# The longest run of one period. Distances between equal entries vote, and the periods with most
# votes are tried. One is missed if each of its entries occurs more than `_LOOK_BACK` times in it,
# or if `_PERIODS` others have more votes.

_LOOK_BACK = 3  # so many earlier ops of an op's class vote for a period, each by its distance
_PERIODS = 16  # tried for each run: those with most votes
_LEAST_OPS = 4  # forward ops of a block; a shorter period is taken several times


def _periodic_run(classes: Ints, crossing: Sequence[int]) -> list[int]:
    """Where the blocks of the longest run begin, and where the last ends; empty if none."""
    best: tuple[int, int, int, int] | None = None
    for period in _periods(classes):
        start, length = _longest_run(classes[:-period] == classes[period:])
        length += period  # comparing ops a period apart leaves out the last repetition
        step = period * -(-_LEAST_OPS // period)
        count = length // step
        if count >= 2 and (best is None or (count * step, count) > best[:2]):
            best = count * step, count, start, length
    if best is None:
        return []
    covered, count, start, length = best
    return _phase(start, length, covered // count, crossing)


def _phase(start: int, length: int, step: int, crossing: Sequence[int]) -> list[int]:
    """Boundaries with the fewest bytes across, on average."""
    most = length // step
    best: tuple[float, list[int]] | None = None
    for offset in range(step):
        count = (length - offset) // step
        if count < 2:
            break
        places = [start + offset + i * step for i in range(count + 1)]
        score = sum(crossing[place] for place in places) / len(places)
        score *= 1 if count == most else 2  # a block fewer is taken only if that halves the bytes
        if best is None or score < best[0]:
            best = score, places
    return best[1] if best else []


def _periods(classes: Ints) -> list[int]:
    """Distances between ops of one class, the most frequent first."""
    votes: Counter[int] = Counter()
    seen: dict[int, list[int]] = {}
    for position, kind in enumerate(classes.tolist()):
        earlier = seen.setdefault(kind, [])
        votes.update(position - other for other in earlier[-_LOOK_BACK:])
        earlier.append(position)
    return [period for period, _ in votes.most_common(_PERIODS)]


def _longest_run(equal: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Start and length of the first longest run of ones."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], equal.astype(np.int8), [0]))))
    lengths = edges[1::2] - edges[::2]
    if not lengths.size:
        return 0, 0
    longest = int(np.argmax(lengths))
    return int(edges[2 * longest]), int(lengths[longest])


Shape = tuple[object, ...]  # all that a block's sub-problem depends on


@dataclass(frozen=True, slots=True)
class Block:
    """Forward ops start..stop-1 with the backward ops back_start..back_stop-1."""

    start: int
    stop: int
    back_start: int
    back_stop: int

    @property
    def ops(self) -> tuple[int, ...]:
        """In captured order."""
        return (*range(self.start, self.stop), *range(self.back_start, self.back_stop))


@dataclass(frozen=True, slots=True)
class Reads:
    """Where each value is read: last in forward, first and last in backward (-1: nowhere)."""

    last_forward: Sequence[int]
    first_backward: Sequence[int]
    last_backward: Sequence[int]

    @classmethod
    def of(cls, problem: Problem) -> Reads:
        first, last = [-1] * problem.n_values, [-1] * problem.n_values
        for op in range(problem.n_forward, problem.n_ops):
            for v in problem.inputs[op]:
                last[v] = op
                if first[v] < 0:
                    first[v] = op
        return cls(problem.last_forward_read, first, last)

    def held_by(self, problem: Problem, block: Block) -> list[int]:
        """Forward values of `block` that others read, or the caller: kept until it is done."""
        return [
            v
            for op in range(block.start, block.stop)
            for v in problem.outputs[op]
            if self.last_forward[v] >= block.stop
            or 0 <= self.first_backward[v] < block.back_start
            or v in problem.forward_outputs
        ]

    def left_by(self, problem: Problem, block: Block) -> list[int]:
        """Values of `block` live when its backward is done: held, read later, or outputs."""
        held = dict.fromkeys(self.held_by(problem, block))
        ends = dict.fromkeys(problem.needs[problem.n_ops])
        return [
            v
            for op in block.ops
            for v in problem.outputs[op]
            if v in held or v in ends or self.last_backward[v] >= block.back_stop
        ]


def find_blocks(problem: Problem, reads: Reads, group: int = 1) -> list[Block]:
    """Blocks that cover the graph: `group` repetitions each, rests of runs, and what is between."""
    if not problem.n_forward:
        return []
    runs = _runs(problem, reads)
    # All boundaries vote on where backward is cut, inside groups too.
    ends = sorted({0, problem.n_forward}.union(*runs))
    place_of = dict(zip(ends, _backward_cuts(problem, reads, ends), strict=True))
    grouped = ((*run[:-1:group], run[-1]) for run in runs)
    return [
        Block(start, stop, place_of[stop], place_of[start])
        for start, stop in pairwise(sorted({0, problem.n_forward}.union(*grouped)))
    ]


def shape_of(problem: Problem, reads: Reads, block: Block) -> Shape:
    """What makes two blocks equal: ops, costs, sizes, wiring, and what leaves the block."""
    number: dict[int, int] = {}
    parts: list[object] = [block.stop - block.start]
    for op in block.ops:
        # By first appearance, so that blocks wired alike are equal.
        wiring = tuple(number.setdefault(v, len(number)) for v in problem.inputs[op])
        for v in problem.outputs[op]:
            number.setdefault(v, len(number))
        parts.append((_class_key(problem, op), wiring))
    parts.append(tuple(number[v] for v in reads.held_by(problem, block)))
    parts.append(tuple(number[v] for v in reads.left_by(problem, block)))
    return tuple(parts)


def _class_key(problem: Problem, op: int) -> Shape:
    sizes = tuple(problem.size_bytes[v] for v in problem.outputs[op])
    own = problem.graph.ops[op].target, problem.cost_us[op], problem.workspace_bytes[op]
    return (*own, problem.no_recompute[op], len(problem.inputs[op]), sizes)


def _runs(problem: Problem, reads: Reads) -> list[list[int]]:
    """For each run of repetitions the forward positions at which they begin, and its end."""
    number: dict[Shape, int] = {}
    keys = (_class_key(problem, op) for op in range(problem.n_forward))
    classes = np.array([number.setdefault(key, len(number)) for key in keys], np.int64)
    crossing = bytes_across(problem, reads.last_forward, range(problem.n_forward))
    found: list[list[int]] = []
    waiting = [(0, problem.n_forward)]
    while waiting:
        low, high = waiting.pop()
        if places := _periodic_run(classes[low:high], crossing[low : high + 1]):
            found.append([low + place for place in places])
            waiting += [(low, low + places[0]), (low + places[-1], high)]
    return found


def _backward_cuts(problem: Problem, reads: Reads, ends: Sequence[int]) -> list[int]:
    """For each forward boundary the first backward op of what is before it."""
    crossing = bytes_across(problem, reads.last_backward, range(problem.n_forward, problem.n_ops))
    gaps = list(_gaps(problem, reads, ends))
    keys = [*(_class_key(problem, op) for op in range(problem.n_ops)), ()]
    firsts = [min(range(low, high + 1), key=lambda at: (crossing[at], at)) for low, high in gaps]
    # Equal forward blocks want equal backward parts: each boundary votes for ops beside its best.
    votes = Counter(vote for first in firsts for vote in _sides(keys, first))
    places = [problem.n_forward]
    for (low, high), first in zip(gaps, firsts, strict=True):
        own = Counter(_sides(keys, first))  # no boundary votes for itself
        likeness = {
            at: sum(votes[side] - own[side] for side in _sides(keys, at))
            # Cuts come in the order of their boundaries.
            for at in range(max(low, places[-1]), max(high, places[-1]) + 1)
        }
        places.append(min(likeness, key=lambda at: (-likeness[at], crossing[at], at)))
    return [problem.n_ops, *reversed(places)]


def _sides(keys: Sequence[Shape], place: int) -> tuple[tuple[int, Shape], tuple[int, Shape]]:
    return (0, keys[place - 1]), (1, keys[place])


def _gaps(problem: Problem, reads: Reads, ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where backward may be cut at each inner boundary, the last first. From the last op that reads
    a value made behind it to the first that reads one spent before."""
    behind = [problem.n_forward] * (problem.n_forward + 1)
    for op in reversed(range(problem.n_forward)):
        own = (reads.last_backward[v] + 1 for v in problem.outputs[op])
        behind[op] = max((behind[op + 1], *own))
    for end in reversed(ends[1:-1]):
        high = behind[end]
        while high < problem.n_ops:
            read = problem.inputs[high]
            if any(max(problem.producer[v], reads.last_forward[v]) < end for v in read):
                break
            high += 1
        yield behind[end], high
