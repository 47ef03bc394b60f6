"""Dynamic programming over sequences of lower sets, with labels of time and memory.

A sequence cuts the forward ops that may run again into segments. What a segment costs
depends on its two ends alone, so a table over pairs of lower sets holds all of it. A label
at a lower set says: this much time for the segments so far, this many bytes that stay.
The paper is named in `lower_set`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from remat.solver.problem import Problem
from remat.solver.segments.lower_set_family import Flags, ForwardGraph, bits_of

Numbers = npt.NDArray[np.float64]
"""Microseconds or bytes: whole numbers of bytes are exact up to 2⁵³."""
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SegmentTable:
    """What the segment from one lower set to a larger one costs; entries [larger, smaller].

    Attributes
    ----------
    masks : the lower sets, from the empty one to the one of all, by size.
    follows : whether the smaller is within the larger. overhead_us : time of running the
        segment again, 0 for the last. kept_bytes : that the segment adds to what stays.
    needed_bytes : during the segment's part of backward, beyond what stays of earlier ones.
    """

    masks: list[int]
    follows: Flags
    overhead_us: Numbers
    kept_bytes: Numbers
    needed_bytes: Numbers

    @classmethod
    def of(cls, graph: ForwardGraph, masks: list[int]) -> SegmentTable:
        """Fill in the table, all lower sets at once."""
        member = np.array([bits_of(mask, len(graph.ops)) for mask in masks]).T.copy()
        again, kept = _contents(graph, member)
        outside = (~member).astype(np.float64)
        cost_us = np.array([graph.problem.cost_us[op] for op in graph.ops])
        overhead_us = (again * cost_us[:, None]).T @ outside
        overhead_us[-1] = 0.0
        inside = member.astype(np.float64)
        sizes = inside.sum(axis=0)
        return cls(
            masks=masks,
            follows=(inside.T @ inside == sizes[None, :]) & (sizes[:, None] > sizes[None, :]),
            overhead_us=overhead_us,
            kept_bytes=kept.T @ outside,
            needed_bytes=_needed_bytes(graph, member) + graph.always_bytes(),
        )


def _contents(graph: ForwardGraph, member: Flags) -> tuple[Flags, Numbers]:
    """By position and lower set: whether it runs again, and the bytes of it that stay.

    A value stays if a position outside the lower set reads it. What runs again does not
    depend on where the segment began: a chain of values that do not stay cannot leave it.
    """
    again = np.zeros_like(member)
    kept = np.zeros(member.shape)
    for p in reversed(range(len(graph.ops))):
        for v in graph.loose_outputs(p):
            stays = np.zeros_like(member[p])
            wanted = np.full_like(member[p], v in graph.read_in_backward)
            for q in graph.readers[v]:
                stays |= ~member[q]
                wanted |= again[q]
            again[p] |= member[p] & ~stays & wanted
            kept[p] += graph.problem.size_bytes[v] * (stays & member[p])
    return again, kept


def _needed_bytes(graph: ForwardGraph, member: Flags) -> Numbers:
    """Most bytes while backward reads a segment: what it has yet to read of it, and its own."""
    problem, reads, last = graph.problem, list[tuple[int, int]](), dict[int, int]()
    position = {v: p for p in range(len(graph.ops)) for v in graph.loose_outputs(p)}
    for t in range(problem.n_forward, problem.n_ops + 1):
        for v in problem.needs[t]:
            if v in position:
                reads.append((position[v], t))
                last[v] = t
    values = sorted(last, key=lambda v: (last[v], v))
    places = np.array([position[v] for v in values], np.int64)
    sizes = np.array([problem.size_bytes[v] for v in values], np.float64)
    readers, stages = np.array(reads, np.int64).reshape(-1, 2).T
    later = np.searchsorted(np.array([last[v] for v in values], np.int64), stages)
    own = np.array(_own_bytes(problem), np.float64)[stages]
    found = np.zeros((member.shape[1], member.shape[1]))
    for i in range(member.shape[1]):
        segment = member & ~member[:, i : i + 1]
        unread = np.cumsum((segment[places] * sizes[:, None])[::-1], axis=0)[::-1]
        needed = np.where(segment[readers], unread[later] + own[:, None], 0.0)
        found[:, i] = needed.max(axis=0, initial=0.0)
    return found


def _own_bytes(problem: Problem) -> list[int]:
    """Bytes of backward's own values while each stage runs, its op's outputs included."""
    last = [0] * problem.n_values
    for t, needed in enumerate(problem.needs):
        for v in needed:
            last[v] = t
    change = [0] * (problem.n_ops + 2)
    for v, op in enumerate(problem.producer):
        if problem.n_forward <= op < last[v]:
            change[op + 1] += problem.size_bytes[v]
            change[last[v] + 1] -= problem.size_bytes[v]
    live, found = 0, list[int]()
    for t in range(problem.n_ops + 1):
        live += change[t]
        own = problem.output_bytes[t] + problem.workspace_bytes[t] if t < problem.n_ops else 0
        found.append(live + own)
    return found


@dataclass(slots=True)
class Labels:
    """Labels of one run of the program, in one array each; label 0 is the empty set's.

    Attributes
    ----------
    owner : index of the label's lower set. parent : the label it was made from.
    time_us, kept_bytes : of the segments so far. count : labels in use.
    """

    owner: Indices
    parent: Indices
    time_us: Numbers
    kept_bytes: Numbers
    count: int = 1

    @classmethod
    def room_for(cls, most: int) -> Labels:
        """Arrays for `most` labels beside the first."""
        return cls(
            np.zeros(most + 1, np.int64),
            np.zeros(most + 1, np.int64),
            np.zeros(most + 1),
            np.zeros(most + 1),
        )

    def add(self, owner: int, parent: Indices, time_us: Numbers, kept_bytes: Numbers) -> None:
        """Append labels of one lower set."""
        part = slice(self.count, self.count + len(parent))
        self.owner[part], self.parent[part] = owner, parent
        self.time_us[part], self.kept_bytes[part] = time_us, kept_bytes
        self.count += len(parent)


@dataclass(slots=True)
class SequenceProgram:
    """Finds the fastest sequence of lower sets under a limit.

    Attributes
    ----------
    table : of the segments. most_labels : kept at a lower set; where there are more, ones
        evenly spread from the fastest to the leanest. was_thinned : whether that happened.
    """

    table: SegmentTable
    most_labels: int
    was_thinned: bool = field(default=False, init=False)

    def fastest(self, limit_bytes: float) -> tuple[float, tuple[int, ...]] | None:
        """Time run again and the lower sets, None where no sequence is within the limit."""
        table, last = self.table, len(self.table.masks) - 1
        labels = Labels.room_for(len(table.masks) * self.most_labels)
        for j in range(1, last + 1):
            self._extend(labels, j, limit_bytes)
        ends = np.flatnonzero(labels.owner[: labels.count] == last)
        if last == 0 or not ends.size:
            return (0.0, ()) if last == 0 else None
        label = int(ends[0])
        found_us, sequence = float(labels.time_us[label]), list[int]()
        while label:
            sequence.append(table.masks[int(labels.owner[label])])
            label = int(labels.parent[label])
        return found_us, tuple(reversed(sequence))

    def _extend(self, labels: Labels, j: int, limit_bytes: float) -> None:
        """Labels at lower set j from those at every smaller one within it."""
        table, owner = self.table, labels.owner[: labels.count]
        within = labels.kept_bytes[: labels.count] + table.needed_bytes[j][owner] <= limit_bytes
        usable = np.flatnonzero(table.follows[j][owner] & within)
        if not usable.size:
            return
        before = owner[usable]
        time_us = labels.time_us[usable] + table.overhead_us[j][before]
        kept_bytes = labels.kept_bytes[usable] + table.kept_bytes[j][before]
        chosen = self._undominated(time_us, kept_bytes)
        labels.add(j, usable[chosen], time_us[chosen], kept_bytes[chosen])

    def _undominated(self, time_us: Numbers, kept_bytes: Numbers) -> Indices:
        """Labels that no other beats in both, the fastest first."""
        order = np.lexsort((kept_bytes, time_us))
        least = np.minimum.accumulate(kept_bytes[order])
        is_better = np.concatenate(([True], least[1:] < least[:-1]))
        front = order[is_better]
        if len(front) <= self.most_labels:
            return front
        self.was_thinned = True
        return front[np.linspace(0, len(front) - 1, self.most_labels).astype(np.int64)]
