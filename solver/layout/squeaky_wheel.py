"""Squeaky wheel optimisation: place greedily, move what stands too high forward, place again.

Joslin and Clements, "Squeaky Wheel" Optimization, Journal of Artificial Intelligence Research 10
(1999), https://doi.org/10.1613/jair.561. An order is all that a greedy placement is made of, so a
search over orders needs no memory of overlaps: its cost is that of its placements.
"""

from __future__ import annotations

import numpy as np

from remat.solver.layout.boxes import Boxes, Ints
from remat.solver.layout.greedy import place_in_order

PATIENCE = 300
"""Placements without a lower one, after which it goes back to the lowest."""
LEAST_JUMP = 10
"""Places in the order by which a box that barely stands too high may move."""


def squeaky_wheel(
    boxes: Boxes, offsets: Ints, goal: int, *, rounds: int, jump: float, seed: int
) -> Ints:
    """The lowest placement in `rounds`, from that of `offsets` on; ends at `goal` bytes.

    Whatever ends above `goal` moves forward in the order, at random, and farther the higher it
    ends: the highest of all by up to `jump` of all places.
    """
    source = np.random.default_rng(seed)
    best, best_top = offsets, boxes.top(offsets)
    here, order, since = offsets, np.argsort(offsets, kind="stable"), 0
    for _ in range(rounds):
        if best_top <= goal:
            break
        order = _moved(boxes, here, order, goal, jump, source)
        placed = place_in_order(boxes, order)
        assert placed is not None, "no ceiling was given"
        here, since = placed, since + 1
        if boxes.top(here) < best_top:
            best, best_top, since = here, boxes.top(here), 0
        elif since >= PATIENCE:
            here, order, since = best, np.argsort(best, kind="stable"), 0
    return best


def _moved(
    boxes: Boxes, offsets: Ints, order: Ints, goal: int, jump: float, source: np.random.Generator
) -> Ints:
    """The order with what ends above `goal` moved forward."""
    excess = offsets + boxes.size - goal
    high = np.flatnonzero(excess > 0)
    rank = np.empty(len(boxes), np.float64)
    rank[order] = np.arange(len(boxes))
    if high.size:
        far = jump * len(boxes) * excess[high] / excess.max()
        rank[high] -= source.random(high.size) * far + source.random(high.size) * LEAST_JUMP
    return np.argsort(rank, kind="stable")
