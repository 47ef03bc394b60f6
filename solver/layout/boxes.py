"""Buffers as boxes: so many bytes high, so many times wide, to be stacked without overlap.

Finding the lowest stack is dynamic storage allocation, which is NP-hard (Garey and Johnson,
1979, SR2). Widths are fixed in place, heights are what a placement stacks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remat.schedules.buffers import Buffers

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Boxes:
    """`size` bytes each, live in [start, end); sizes are multiples of the alignment.

    `stretch` is the length in time that each had before times were ranked, for instances whose
    times are far apart; `end - start` without one.
    """

    size: Ints
    start: Ints
    end: Ints
    stretch: Ints | None = None

    @classmethod
    def of(cls, buffers: Buffers, alignment_bytes: int) -> Boxes:
        """Boxes whose sizes are rounded up, and whose times are ranked: only events count."""
        size = -(-buffers.size_bytes // alignment_bytes) * alignment_bytes
        times = np.unique(np.concatenate([buffers.start, buffers.end]))
        start, end = np.searchsorted(times, buffers.start), np.searchsorted(times, buffers.end)
        return cls(size, start, end, buffers.end - buffers.start)

    def __len__(self) -> int:
        return len(self.size)

    def those(self, mask: Mask) -> Boxes:
        """The boxes where `mask` holds."""
        stretch = None if self.stretch is None else self.stretch[mask]
        return Boxes(self.size[mask], self.start[mask], self.end[mask], stretch)

    @functools.cached_property
    def length(self) -> Ints:
        """Times from start to end."""
        return self.end - self.start

    @functools.cached_property
    def curve(self) -> Ints:
        """Bytes live at each time."""
        change = np.zeros(int(self.end.max(initial=0)) + 1, np.int64)
        np.add.at(change, self.start, self.size)
        np.add.at(change, self.end, -self.size)
        return np.cumsum(change)[:-1]

    @functools.cached_property
    def load(self) -> int:
        """The most bytes live at once: no stack is lower."""
        return int(self.curve.max(initial=0))

    @functools.cached_property
    def crowd(self) -> Ints:
        """The most bytes live at once during each box: how much its place matters."""
        return range_maxima(self.curve, self.start, self.end)

    def top(self, offsets: Ints) -> int:
        """Bytes from 0 to the highest end."""
        return int((offsets + self.size).max(initial=0))


def range_maxima(numbers: Ints, start: Ints, end: Ints) -> Ints:
    """max(numbers[start:end]) of each range, none of them empty, by a table of doubled ranges."""
    found = np.empty(len(start), np.int64)
    level = np.frexp((end - start).astype(np.float64))[1] - 1
    table = numbers
    for k in range(int(level.max(initial=-1)) + 1):
        mine = np.flatnonzero(level == k)
        found[mine] = np.maximum(table[start[mine]], table[end[mine] - (1 << k)])
        table = np.maximum(table[: -(1 << k)], table[1 << k :])
    return found
