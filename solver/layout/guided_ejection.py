"""Guided ejection search: what fits nowhere takes the place of what is cheapest to place again.

Y. Nagata and O. Bräysy, "A powerful route minimization heuristic for the vehicle routing problem
with time windows", Operations Research Letters 37 (2009), https://doi.org/10.1016/j.orl.2009.04.006.

Theirs moves customers between routes; here boxes are moved within a capacity. A box that had to
eject others becomes dearer to eject, so that what is hard to place is placed first in the end. A
step looks only at what is live during one box, so its cost is that of one greedy placement.
"""

from __future__ import annotations

import heapq

import numpy as np

from remat.solver.layout.boxes import Boxes, Floats, Ints

GROWTH = 1.3
"""Of the price of a box, each time that it ejects others."""
MOST_PRICE = 1e6
"""Of any box, in areas of the largest: sums of prices keep the bits of the small ones."""
NOISE = 0.3
"""By up to which part prices of places seem higher than they are, so that no round repeats."""
NEVER = 1 << 62
"""When a box starts that is not placed."""


class _Arena:
    """Offsets of all boxes, and when those that are placed are live."""

    def __init__(self, boxes: Boxes, offsets: Ints, capacity: int) -> None:
        area = boxes.length * boxes.size.astype(np.float64)
        is_placed = offsets + boxes.size <= capacity
        self.boxes, self.capacity, self.offsets = boxes, capacity, offsets.copy()
        self.start = np.where(is_placed, boxes.start, NEVER)
        self.price = area / area.max(initial=1)
        self.rank = np.argsort(np.argsort(-area, kind="stable"), kind="stable").tolist()
        self.waiting = [(self.rank[box], box) for box in np.flatnonzero(~is_placed).tolist()]
        heapq.heapify(self.waiting)

    def put_largest(self, source: np.random.Generator) -> None:
        """The largest that waits goes where it ejects the least, and that waits again."""
        _, box = heapq.heappop(self.waiting)
        boxes = self.boxes
        size, start, end = int(boxes.size[box]), int(boxes.start[box]), int(boxes.end[box])
        live = ((self.start < end) & (boxes.end > start)).nonzero()[0]
        low, high = self.offsets[live], self.offsets[live] + boxes.size[live]
        offset = _cheapest(low, high, self.price[live], size, self.capacity, source)
        ejected = live[(low < offset + size) & (high > offset)]
        self.offsets[box], self.start[box] = offset, start
        if ejected.size:
            self.price[box] = min(GROWTH * self.price[box], MOST_PRICE)
            self.start[ejected] = NEVER
            for other in ejected.tolist():
                heapq.heappush(self.waiting, (self.rank[other], other))


def guided_ejection(
    boxes: Boxes, offsets: Ints, capacity: int, *, steps: int, seed: int
) -> Ints | None:
    """Offsets within `capacity`, from `offsets` on, or None if it takes more than `steps`."""
    if boxes.size.max(initial=0) > capacity:
        return None
    source, arena = np.random.default_rng(seed), _Arena(boxes, offsets, capacity)
    for _ in range(steps):
        if not arena.waiting:
            break
        arena.put_largest(source)
    return None if arena.waiting else arena.offsets


def _cheapest(
    low: Ints, high: Ints, price: Floats, size: int, capacity: int, source: np.random.Generator
) -> int:
    """The lowest offset at which `size` bytes eject least, on or below what is live or at 0."""
    places = np.concatenate([np.zeros(1, np.int64), high, low - size])
    places = np.sort(places[(places >= 0) & (places + size <= capacity)])
    by_low, by_high = np.argsort(low, kind="stable"), np.argsort(high, kind="stable")
    begun = np.searchsorted(low[by_low], places + size, side="left")
    ended = np.searchsorted(high[by_high], places, side="right")
    prices = _sums(price[by_low])[begun] - _sums(price[by_high])[ended]
    # Sums in two orders differ in the last bits, where nothing at all is ejected.
    prices[begun == ended] = 0
    return int(places[(prices * (1 + NOISE * source.random(prices.size))).argmin()])


def _sums(numbers: Floats) -> Floats:
    """The sum of the first k of `numbers`, for each k."""
    return np.concatenate([np.zeros(1), np.cumsum(numbers)])
