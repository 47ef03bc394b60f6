"""What all searches of one set of boxes share: sections of time, who is in them, who overlaps whom.

A section is a maximal set of boxes that are live together; sections follow each other in time, and
each box is in a range of them. Lists of overlaps are quadratic in the number of boxes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from remat.solver.layout.boxes import Boxes, Ints

MOST_OVERLAPS = 4_000_000
"""Above it the lists take too much memory and their searches too much time."""


class Sections(NamedTuple):
    """Arrays alone, so that compiled functions take it.

    `size`, and `low` to `high` the sections of each box. Those that share a section with box i are
    `overlaps[overlap_at[i] : overlap_at[i + 1]]`, and those in section s are
    `members[member_at[s] : member_at[s + 1]]`.
    """

    size: Ints
    low: Ints
    high: Ints
    overlap_at: Ints
    overlaps: Ints
    member_at: Ints
    members: Ints

    @property
    def totals(self) -> Ints:
        """Bytes of each section."""
        if not len(self.members):
            return np.zeros(0, np.int64)
        return np.add.reduceat(self.size[self.members], self.member_at[:-1])

    @property
    def crossings(self) -> Ints:
        """How many boxes go from each section on into the next."""
        change = np.zeros(len(self.member_at), np.int64)
        np.add.at(change, self.low, 1)
        np.add.at(change, self.high - 1, -1)
        return np.cumsum(change)[:-1]


def overlaps_in(boxes: Boxes) -> int:
    """How long the lists of overlaps are, each pair counted twice; they are not made."""
    starts, ends = np.sort(boxes.start), np.sort(boxes.end)
    begun = np.searchsorted(starts, boxes.end, side="left")
    ended = np.searchsorted(ends, boxes.start, side="right")
    return int((begun - ended - 1).sum())


def sections_of(boxes: Boxes) -> Sections:
    """The sections of `boxes`."""
    low, high = _ranges(boxes)
    rows = [np.flatnonzero((low < b) & (high > a)) for a, b in zip(low, high, strict=True)]
    rows = [row[row != i] for i, row in enumerate(rows)]
    columns = [np.flatnonzero((low <= s) & (s < high)) for s in range(int(high.max(initial=0)))]
    return Sections(boxes.size, low, high, *_joined(rows), *_joined(columns))


def _ranges(boxes: Boxes) -> tuple[Ints, Ints]:
    """First section of each box, and the first after its last: one ends before each run of ends."""
    n = len(boxes)
    low, high = np.zeros(n, np.int64), np.zeros(n, np.int64)
    ends = [(int(time), 0, i) for i, time in enumerate(boxes.end)]
    starts = [(int(time), 1, i) for i, time in enumerate(boxes.start)]
    section, has_grown = 0, False
    for _, is_start, i in sorted([*ends, *starts]):
        if is_start:
            low[i], has_grown = section, True
        else:
            section, has_grown = section + has_grown, False
            high[i] = section
    return low, high


def _joined(rows: list[Ints]) -> tuple[Ints, Ints]:
    """Where each row begins in all of them, and all of them."""
    at = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=at[1:])
    return at, np.concatenate([*rows, np.zeros(0, np.int64)])
