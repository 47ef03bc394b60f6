"""Simulated annealing over orders, where a move knows the height at each place: Imanishi and Xu's.

Y. Imanishi and Z. Xu, "A Heuristic for Periodic Memory Allocation with Little Fragmentation to
Train Neural Networks", ISMM 2024, https://doi.org/10.1145/3652024.3665507.

In an order each box falls onto the highest of those before it. A step takes one box out and puts it
where the stack through it is low: one sweep from below and one from above give that height at all
places, and noise of the temperature decides among them, as a heat bath does. A step costs two
sweeps, so thousands of them want compiled code.
"""

from __future__ import annotations

import numpy as np

from remat.solver.layout.boxes import Boxes, Floats, Ints
from remat.solver.layout.jit import compiled

CHUNK = 100
"""Steps whose random numbers are drawn together."""
COLDEST = 1e-3
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
def anneal_chunk(
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
    """The lowest placement in `steps`, from the order of `offsets` on; ends at `goal` bytes.

    Temperatures, in bytes, fall by a constant factor from `hottest` on.
    """
    source, n = np.random.default_rng(seed), len(boxes)
    order = np.argsort(offsets, kind="stable")
    best, best_top = order.copy(), boxes.top(offsets)
    temperatures = hottest * COLDEST ** (np.arange(steps) / steps)
    for first in range(0, steps, CHUNK):
        hot = temperatures[first : first + CHUNK, None]
        picks = source.integers(0, n, len(hot))
        noise = -hot * np.log(-np.log(source.uniform(1e-300, 1.0, (len(hot), n))))
        best_top = anneal_chunk(
            boxes.size, boxes.start, boxes.end, order, best, best_top, picks, noise, goal
        )
        if best_top <= goal:
            break
    if best_top == boxes.top(offsets):
        return offsets
    heights = np.empty(n, np.int64)
    stacked(boxes.size, boxes.start, boxes.end, best, 0, np.empty(n + 1, np.int64), heights)
    return heights - boxes.size
