"""An address space with a first-fit or best-fit allocator, for policies that count fragmentation.

Source: best fit and first fit with immediate coalescing, as in D. Knuth, "The Art of
Computer Programming", volume 1, section 2.5, and in the caching allocators of frameworks.
Solves: where a block of bytes goes when blocks come and go and none can be moved. A block
needs one hole that holds all of it; the sum of the holes does not help.
Used by: `dte` and `coop`, whose rules are about addresses. Their arena has the size of the
budget. The peak of their plans still counts bytes, as that of every plan.
Cost: a placement scans the holes; a release finds its place by bisection.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Fit = Literal["best", "low", "high"]
"""The smallest hole that fits; the lowest one, filled from below; the highest, from above."""
HOLE = -1


class Arena:
    """Blocks 0..n_blocks-1 in an address space of `capacity_bytes`.

    Blocks of no bytes have no address: they always fit. A hole's neighbours are blocks.

    Attributes
    ----------
    at : address of each block present.
    beside_bytes : for each block present the bytes of the holes on both its sides.
    """

    def __init__(self, capacity_bytes: int, n_blocks: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.at: dict[int, int] = {}
        self.beside_bytes: npt.NDArray[np.int64] = np.zeros(n_blocks, np.int64)
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        self._holes: list[int] = []
        if capacity_bytes > 0:
            self._insert(0, capacity_bytes, HOLE)

    @property
    def free_bytes(self) -> int:
        """Sum of the holes."""
        return sum(self._sizes[start] for start in self._holes)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(address, bytes, block or `HOLE`) of all that there is, in address order."""
        for start in self._starts:
            yield start, self._sizes[start], self._owners[start]

    def place(self, block: int, size_bytes: int, fit: Fit = "best") -> bool:
        """Put `block` into a hole; return whether one was large enough."""
        if size_bytes == 0:
            return True
        hole = self._find(size_bytes, fit)
        if hole is None:
            return False
        rest_bytes = self._sizes[hole] - size_bytes
        self._remove(hole)
        start = hole + rest_bytes if fit == "high" else hole
        self._insert(start, size_bytes, block)
        self.at[block] = start
        if rest_bytes:
            self._insert(hole if fit == "high" else hole + size_bytes, rest_bytes, HOLE)
        self._note_beside(start)
        return True

    def release(self, block: int) -> None:
        """Make a hole of `block`, joined with the holes beside it."""
        if block not in self.at:
            return
        start = self.at.pop(block)
        i = bisect_left(self._starts, start)
        first, last = max(i - 1, 0), i + 2
        merged = [s for s in self._starts[first:last] if s == start or self._owners[s] == HOLE]
        size_bytes = sum(self._sizes[s] for s in merged)
        for s in merged:
            self._remove(s)
        self._insert(merged[0], size_bytes, HOLE)
        self._note_beside(merged[0])

    def _find(self, size_bytes: int, fit: Fit) -> int | None:
        holes = reversed(self._holes) if fit == "high" else self._holes
        enough = (hole for hole in holes if self._sizes[hole] >= size_bytes)
        if fit == "best":
            return min(enough, key=lambda hole: (self._sizes[hole], hole), default=None)
        return next(enough, None)

    def _insert(self, start: int, size_bytes: int, owner: int) -> None:
        insort(self._starts, start)
        self._sizes[start] = size_bytes
        self._owners[start] = owner
        if owner == HOLE:
            insort(self._holes, start)

    def _remove(self, start: int) -> None:
        self._starts.pop(bisect_left(self._starts, start))
        if self._owners[start] == HOLE:
            self._holes.pop(bisect_left(self._holes, start))
        del self._sizes[start], self._owners[start]

    def _note_beside(self, start: int) -> None:
        """Bring `beside_bytes` up to date around a change at `start`."""
        i = bisect_left(self._starts, start)
        for j in range(max(i - 2, 0), min(i + 3, len(self._starts))):
            owner = self._owners[self._starts[j]]
            if owner != HOLE:
                self.beside_bytes[owner] = self._hole_bytes(j - 1) + self._hole_bytes(j + 1)

    def _hole_bytes(self, j: int) -> int:
        if not 0 <= j < len(self._starts) or self._owners[self._starts[j]] != HOLE:
            return 0
        return self._sizes[self._starts[j]]


def cheapest_window(
    sizes_bytes: Sequence[int], costs: Sequence[float], asked_bytes: int
) -> tuple[int, int] | None:
    """The cheapest run of neighbours of at least `asked_bytes`, as (first, past the last).

    Two pointers find, for each last one, the shortest run that is long enough: a longer one
    costs no less, as no cost is negative. An infinite cost is a barrier. Of equal runs the
    lowest is taken; None if there is none.
    """
    best: tuple[float, int, int] | None = None
    first, held_bytes, cost = 0, 0, 0.0
    for last, size_bytes in enumerate(sizes_bytes):
        if costs[last] == float("inf"):
            first, held_bytes, cost = last + 1, 0, 0.0
            continue
        held_bytes += size_bytes
        cost += costs[last]
        while held_bytes - sizes_bytes[first] >= asked_bytes and first < last:
            held_bytes -= sizes_bytes[first]
            cost -= costs[first]
            first += 1
        if held_bytes >= asked_bytes and (best is None or cost < best[0]):
            best = cost, first, last + 1
    return best[1:] if best else None
