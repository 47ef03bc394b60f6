"""From buffers to a layout near the most live bytes: a portfolio of placements.

Related: Y. Imanishi and Z. Xu, "A Heuristic for Periodic Memory Allocation with Little
Fragmentation to Train Neural Networks", ISMM 2024; H. Shu et al., "ROAM: Memory-Efficient Large
DNN Training via Optimized Operator Ordering and Memory Layout", 2023, arXiv 2310.19295; STAlloc,
2025, arXiv 2507.16274.

In order: small buffers, half of a step's and a thousandth of its bytes, wait. The others are placed
greedily, then by dives of the canonical search, then by the squeaky wheel, until they are near
their most live bytes; where Numba is installed, what is still high is annealed. The small ones fill
the holes. All limits are of work, so the same buffers get the same layout.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from remat.schedules.buffers import Buffers
from remat.schedules.layout import Layout, check_alignment, check_layout
from remat.solver.layout.box_orders import box_orders
from remat.solver.layout.boxes import Boxes, Ints, Mask
from remat.solver.layout.canonical import CanonicalSearch
from remat.solver.layout.capacity import dive
from remat.solver.layout.greedy import greedy, place_in_order
from remat.solver.layout.insertion_annealing import insertion_annealing
from remat.solver.layout.jit import IS_COMPILED
from remat.solver.layout.sections import MOST_OVERLAPS, overlaps_in
from remat.solver.layout.squeaky_wheel import squeaky_wheel

SMALL_PART = 4096
"""A buffer below this part of the most live bytes is small."""
SLACK_PART = 2048
"""A placement is low enough at this part of the most live bytes above them, .05 %."""
TRIES = 3500
"""Placements tried in each dive, or 1.25 a box: most that succeed take little above one a box."""
JUMPS = 0.1, 0.5, 0.25, 0.1
"""Of the squeaky wheel, one run each; which does well differs from step to step."""
WHEEL_WORK = 200_000
"""Boxes placed by the squeaky wheel in all, some seconds of NumPy."""

ANNEALING_STEPS, ANNEALING_WORK = 20_000, 16_000_000
"""Steps of each annealing, and boxes in all of them: some seconds of compiled code."""
HOTTEST_PARTS = 300, 300, 500, 200
"""Of the load, the first temperature of each annealing."""


class Found(NamedTuple):
    """Offsets, and what found them."""

    offsets: Ints
    by: str


def place(buffers: Buffers, *, alignment_bytes: int = 512) -> Layout:
    """A layout of `buffers` in one arena as small as it was found, judged by `check_layout`.

    Parameters
    ----------
    buffers : of `buffers_of`, or of any other origin.
    alignment_bytes : a power of two that each offset is a multiple of.

    Raises
    ------
    LayoutError : the alignment is no power of two.
    """
    check_alignment(alignment_bytes)
    boxes = Boxes.of(buffers, alignment_bytes)
    found = _place(boxes)
    arena_bytes = int((found.offsets + buffers.size_bytes).max(initial=0))
    layout = Layout(
        offsets_bytes=tuple(found.offsets.tolist()),
        arena_bytes=arena_bytes,
        load_bytes=buffers.load_bytes,
        alignment_bytes=alignment_bytes,
        buffers_hash=buffers.hash,
        placed_by=found.by,
    )
    check_layout(buffers, layout)
    return layout


def _place(boxes: Boxes) -> Found:
    is_large = boxes.size * SMALL_PART >= boxes.load
    slack = boxes.load // SLACK_PART
    # Small ones on top of the large ones are within the slack at worst.
    large, small_load = boxes.those(is_large), boxes.those(~is_large).load
    goal = max(large.load, boxes.load + slack - small_load)
    found = _place_large(large, goal)
    if is_large.all():
        return found
    offsets = np.zeros(len(boxes), np.int64)
    offsets[is_large] = found.offsets
    return Found(_fill_holes(boxes, ~is_large, offsets, boxes.load + slack), found.by)


def _place_large(boxes: Boxes, goal: int) -> Found:
    """Greedily; then dives at `goal`; then the squeaky wheel from the lowest, then annealing."""
    best = Found(*greedy(boxes, goal))
    if boxes.top(best.offsets) <= goal:
        return best
    if overlaps_in(boxes) <= MOST_OVERLAPS:
        dived = dive(CanonicalSearch(boxes), goal, max(TRIES, len(boxes) + len(boxes) // 4))
        if dived.offsets is not None:
            return Found(dived.offsets, f"canonical search, {dived.preorder.keys}")
    rounds = WHEEL_WORK // len(JUMPS) // len(boxes)
    for seed, jump in enumerate(JUMPS):
        if boxes.top(best.offsets) <= goal:
            break
        turned = squeaky_wheel(boxes, best.offsets, goal, rounds=rounds, jump=jump, seed=seed)
        if boxes.top(turned) < boxes.top(best.offsets):
            best = Found(turned, "squeaky wheel")
    return _annealed(boxes, best, goal) if IS_COMPILED else best


def _annealed(boxes: Boxes, best: Found, goal: int) -> Found:
    """`best`, or what annealing makes of it."""
    steps = min(ANNEALING_STEPS, ANNEALING_WORK // len(boxes))
    for seed, part in enumerate(HOTTEST_PARTS):
        if boxes.top(best.offsets) <= goal:
            break
        cooled = insertion_annealing(
            boxes, best.offsets, goal, steps=steps, hottest=boxes.load / part, seed=seed
        )
        if boxes.top(cooled) < boxes.top(best.offsets):
            best = Found(cooled, "annealing")
    return best


def _fill_holes(boxes: Boxes, is_small: Mask, offsets: Ints, goal: int) -> Ints:
    """The small ones into holes between the others; the lowest of few orders."""
    best, best_top = offsets, 1 << 62
    for order in box_orders(boxes).values():
        small = order[is_small[order]]
        filled = place_in_order(boxes, small, given=offsets, ceiling=best_top)
        if filled is not None:
            best, best_top = filled, boxes.top(filled)
        if best_top <= goal:
            break
    return best
