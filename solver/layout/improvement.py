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

from remat.graph_capture.graph import Floats, Ints
from remat.solver.layout.boxes import Boxes, compiled

_GROWTH = 1.3
"""Of the penalty of a box, each time that it ejects others."""
MOST_PENALTY = 1e6
"""Of any box, in areas of the largest: sums of penalties keep the bits of the small ones."""
_NOISE = 0.3
"""By up to which part penalties of places seem higher than they are, so that no round repeats."""
_NEVER = 1 << 62
"""When a box starts that is not placed."""


class _Arena:
    """Offsets of all boxes, and when those that are placed are live."""

    def __init__(self, boxes: Boxes, offsets: Ints, capacity: int) -> None:
        area = boxes.length * boxes.size.astype(np.float64)
        is_placed = offsets + boxes.size <= capacity
        self.boxes, self.capacity, self.offsets = boxes, capacity, offsets.copy()
        self.start = np.where(is_placed, boxes.start, _NEVER)
        self.penalty = area / area.max(initial=1)
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
        offset = _cheapest(low, high, self.penalty[live], size, self.capacity, source)
        ejected = live[(low < offset + size) & (high > offset)]
        self.offsets[box], self.start[box] = offset, start
        if ejected.size:
            self.penalty[box] = min(_GROWTH * self.penalty[box], MOST_PENALTY)
            # Never live, so in nobody's way.
            self.start[ejected] = _NEVER
            for other in ejected.tolist():
                heapq.heappush(self.waiting, (self.rank[other], other))


def guided_ejection(
    boxes: Boxes, offsets: Ints, capacity: int, *, steps: int, seed: int
) -> Ints | None:
    """Offsets within `capacity`, or None if it takes more than `steps`."""
    if boxes.size.max(initial=0) > capacity:
        return None
    source, arena = np.random.default_rng(seed), _Arena(boxes, offsets, capacity)
    for _ in range(steps):
        if not arena.waiting:
            break
        arena.put_largest(source)
    return None if arena.waiting else arena.offsets


def _cheapest(
    low: Ints, high: Ints, penalty: Floats, size: int, capacity: int, source: np.random.Generator
) -> int:
    """The lowest offset at which `size` bytes eject least, on or below what is live or at 0."""
    # What is ejected changes only where some box ends or begins.
    places = np.concatenate([np.zeros(1, np.int64), high, low - size])
    places = np.sort(places[(places >= 0) & (places + size <= capacity)])
    by_low, by_high = np.argsort(low, kind="stable"), np.argsort(high, kind="stable")
    begun = np.searchsorted(low[by_low], places + size, side="left")
    ended = np.searchsorted(high[by_high], places, side="right")
    penalties = _sums(penalty[by_low])[begun] - _sums(penalty[by_high])[ended]
    # Sums in two orders differ in the last bits, where nothing at all is ejected.
    penalties[begun == ended] = 0
    return int(places[(penalties * (1 + _NOISE * source.random(penalties.size))).argmin()])


def _sums(numbers: Floats) -> Floats:
    """The sum of the first k of `numbers`, for each k."""
    return np.concatenate([np.zeros(1), np.cumsum(numbers)])


# Simulated annealing over orders, where a move knows the height at each place: Imanishi and Xu's.
#
# Y. Imanishi and Z. Xu, "A Heuristic for Periodic Memory Allocation with Little Fragmentation to
# Train Neural Networks", ISMM 2024, https://doi.org/10.1145/3652024.3665507.
#
# In an order each box falls onto the highest of those before it. A step takes one box out and puts
# it where the stack through it is low: one sweep from below and one from above give that height at
# all places, and noise of the temperature decides among them, as a heat bath does. A step costs two
# sweeps, so thousands of them want compiled code.


_CHUNK = 100
"""Steps whose random numbers are drawn together."""
_COLDEST = 1e-3
"""Of the first temperature, the last one."""


@compiled
def stacked(
    size: Ints, start: Ints, end: Ints, order: Ints, box: int, levels: Ints, heights: Ints
) -> int:
    """Let boxes fall in `order`; the height of all.

    `levels[k]` becomes the height during the life of `box` before the k-th of them falls, with one
    more after the last; `heights` the end of each box that falls.
    """
    profile = np.zeros(end.max(), np.int64)
    highest = 0
    for k in range(order.size):
        levels[k] = highest
        one = order[k]
        top = profile[start[one] : end[one]].max() + size[one]
        profile[start[one] : end[one]] = top
        heights[one] = top
        if top > highest and start[one] < end[box] and start[box] < end[one]:
            highest = top
    levels[order.size] = highest
    return int(profile.max())


@compiled
def _anneal_chunk(
    size: Ints,
    start: Ints,
    end: Ints,
    order: Ints,
    best: Ints,
    best_top: int,
    picks: Ints,
    noise: Floats,
    goal: int,
) -> int:
    """One step a pick, from `order` on, in place; the least height, whose order is in `best`."""
    n = order.size
    below, above, heights = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    for step in range(picks.size):
        at = int(picks[step])
        box = int(order[at])
        rest = np.concatenate((order[:at], order[at + 1 :]))
        without = stacked(size, start, end, rest, box, below, heights)
        # A copy, as Numba would compile another function for arrays that run backwards.
        stacked(size, start, end, rest[::-1].copy(), box, above, heights)
        through = below + above[::-1] + size[box]
        to = int((through - noise[step]).argmin())
        order[:to], order[to], order[to + 1 :] = rest[:to], box, rest[to:]
        top = max(without, int(through[to]))
        if top < best_top:
            best_top = top
            best[:] = order
            if top <= goal:
                break
    return best_top


def insertion_annealing(
    boxes: Boxes, offsets: Ints, goal: int, *, steps: int, hottest: float, seed: int
) -> Ints:
    """The lowest placement found; temperatures are bytes and fall geometrically."""
    source, n = np.random.default_rng(seed), len(boxes)
    order = np.argsort(offsets, kind="stable")
    best, best_top = order.copy(), boxes.top(offsets)
    temperatures = hottest * _COLDEST ** (np.arange(steps) / steps)
    for first in range(0, steps, _CHUNK):
        hot = temperatures[first : first + _CHUNK, None]
        picks = source.integers(0, n, len(hot))
        # Gumbel noise: taking the least of the sums draws a place by its Boltzmann weight. 1e-300
        # keeps the logarithms finite.
        noise = -hot * np.log(-np.log(source.uniform(1e-300, 1.0, (len(hot), n))))
        best_top = _anneal_chunk(
            boxes.size, boxes.start, boxes.end, order, best, best_top, picks, noise, goal
        )
        if best_top <= goal:
            break
    # Falling in the order of `offsets`, boxes may come to lie higher than these.
    if best_top == boxes.top(offsets):
        return offsets
    heights = np.empty(n, np.int64)
    stacked(boxes.size, boxes.start, boxes.end, best, 0, np.empty(n + 1, np.int64), heights)
    return heights - boxes.size
