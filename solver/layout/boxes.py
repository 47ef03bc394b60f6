"""Buffers as boxes, to be stacked without overlap: NP-hard (Garey and Johnson 1979, SR2)."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from remat.graph_capture.graph import Ints
from remat.schedules.layout import Buffers, live_sums

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Boxes:
    """`size` bytes each, live in [start, end); sizes are multiples of the alignment."""

    size: Ints
    start: Ints
    end: Ints
    stretch: Ints | None = None  # lengths before times were ranked, where times are far apart

    @classmethod
    def of(cls, buffers: Buffers, alignment_bytes: int) -> Boxes:
        size = -(-buffers.size_bytes // alignment_bytes) * alignment_bytes
        times = np.unique(np.concatenate([buffers.start, buffers.end]))  # only their order counts
        start, end = np.searchsorted(times, buffers.start), np.searchsorted(times, buffers.end)
        return cls(size, start, end, buffers.end - buffers.start)

    def __len__(self) -> int:
        return len(self.size)

    def those(self, mask: Mask) -> Boxes:
        stretch = None if self.stretch is None else self.stretch[mask]
        return Boxes(self.size[mask], self.start[mask], self.end[mask], stretch)

    @functools.cached_property
    def length(self) -> Ints:
        return self.end - self.start

    @functools.cached_property
    def curve(self) -> Ints:
        return live_sums(self.size, self.start, self.end, int(self.end.max(initial=0)))

    @functools.cached_property
    def load(self) -> int:
        """The most bytes live at once: no stack is lower."""
        return int(self.curve.max(initial=0))

    @functools.cached_property
    def crowd(self) -> Ints:
        """The most bytes live at once during each box: how much its place matters."""
        return range_maxima(self.curve, self.start, self.end)

    def top(self, offsets: Ints) -> int:
        return int((offsets + self.size).max(initial=0))


def range_maxima(numbers: Ints, start: Ints, end: Ints) -> Ints:
    """max(numbers[start:end]) of each range, none of them empty, by a table of doubled ranges."""
    found = np.empty(len(start), np.int64)
    level = np.frexp((end - start).astype(np.float64))[1] - 1  # this is log2 rounded down
    table = numbers
    for k in range(int(level.max(initial=-1)) + 1):
        mine = np.flatnonzero(level == k)
        found[mine] = np.maximum(table[start[mine]], table[end[mine] - (1 << k)])
        table = np.maximum(table[: -(1 << k)], table[1 << k :])
    return found


# Numba where it is installed: decorated functions keep to what both it and NumPy run, alike.

_Function = TypeVar("_Function", bound=Callable[..., Any])

try:
    _numba: Any = importlib.import_module("numba")
except ImportError:
    _numba = None

IS_COMPILED = hasattr(_numba, "njit")  # a folder of that name is no Numba


def compiled(function: _Function) -> _Function:
    """`function` compiled by Numba on its first call and kept on disk, or as it is."""
    # Numba aborts on cached functions that call themselves.
    return _numba.njit(cache=True)(function) if IS_COMPILED else function


def loops_or_arrays(loops: _Function, arrays: _Function) -> _Function:
    """One function written twice: loops for Numba, whole arrays for NumPy alone."""
    return compiled(loops) if IS_COMPILED else arrays


# A section is a maximal set of boxes live together. Lists of overlaps are quadratic in the boxes.

MOST_OVERLAPS = 4_000_000  # above it, lists and their searches are too large


class Sections(NamedTuple):
    """Arrays alone, for compiled functions. Sections of box i go from `low` to `high`. Those that
    share one with it are `overlaps[overlap_at[i] : overlap_at[i + 1]]`; section s has
    `members[member_at[s] : member_at[s + 1]]`."""

    size: Ints
    low: Ints
    high: Ints
    overlap_at: Ints
    overlaps: Ints
    member_at: Ints
    members: Ints

    @property
    def totals(self) -> Ints:
        if not len(self.members):  # `reduceat` refuses empty arrays
            return np.zeros(0, np.int64)
        return np.add.reduceat(self.size[self.members], self.member_at[:-1])

    @property
    def crossings(self) -> Ints:
        """How many boxes go from each section on into the next."""
        ones = np.ones(len(self.low), np.int64)
        return live_sums(ones, self.low, self.high - 1, len(self.member_at) - 1)


def overlaps_in(boxes: Boxes) -> int:
    """Length of the lists of overlaps, each pair counted twice; they are not made."""
    starts, ends = np.sort(boxes.start), np.sort(boxes.end)
    begun = np.searchsorted(starts, boxes.end, side="left")
    ended = np.searchsorted(ends, boxes.start, side="right")
    return int((begun - ended - 1).sum())  # less the box itself


def sections_of(boxes: Boxes) -> Sections:
    low, high = _ranges(boxes)
    rows = [np.flatnonzero((low < b) & (high > a)) for a, b in zip(low, high, strict=True)]
    rows = [row[row != i] for i, row in enumerate(rows)]
    columns = [np.flatnonzero((low <= s) & (s < high)) for s in range(int(high.max(initial=0)))]
    return Sections(boxes.size, low, high, *_joined(rows), *_joined(columns))


def _ranges(boxes: Boxes) -> tuple[Ints, Ints]:
    """First section of each box, and the first after its last; ends divide them."""
    n = len(boxes)
    low, high = np.zeros(n, np.int64), np.zeros(n, np.int64)
    # Ends sort before starts: boxes that meet do not overlap.
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
