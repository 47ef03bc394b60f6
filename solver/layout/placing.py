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

from remat.graph_capture.errors import LayoutError
from remat.graph_capture.graph_rules import MOST_BYTES
from remat.schedules.buffers import Buffers
from remat.schedules.layout import Layout, check_alignment, check_layout
from remat.solver.layout.box_orders import box_orders
from remat.solver.layout.boxes import Boxes, Ints, Mask
from remat.solver.layout.canonical import CanonicalSearch
from remat.solver.layout.capacity import dive
from remat.solver.layout.greedy import NO_CEILING, greedy, place_in_order
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
ALL_TRIES = 30_000
"""Of all dives at one capacity: about two seconds of NumPy."""
RELAXED = 0.0, 0.0004, 0.004, 0.016
"""Of the load: by how much dives may be above the goal, if none is found at it."""
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
    LayoutError : the alignment is no power of two, or is too large for these buffers.
    """
    check_alignment(alignment_bytes)
    _check_offsets_exist(buffers, alignment_bytes)
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


def _check_offsets_exist(buffers: Buffers, alignment_bytes: int) -> None:
    """Raise `LayoutError` where offsets of all buffers could not be told in 64 bits."""
    total_bytes = sum(buffers.size_bytes.tolist())
    if total_bytes + len(buffers) * alignment_bytes >= MOST_BYTES:
        most_bytes = max((MOST_BYTES - total_bytes - 1) // len(buffers), 1)
        raise LayoutError(
            f"an alignment of {alignment_bytes} bytes is one that no offsets of {len(buffers)} "
            f"buffers can keep below {MOST_BYTES}: take at most "
            f"{1 << (most_bytes.bit_length() - 1)}, such as 64 for a CPU or 512 for CUDA"
        )


def _place(boxes: Boxes) -> Found:
    is_large = boxes.size * SMALL_PART >= boxes.load
    low_enough = boxes.load + boxes.load // SLACK_PART
    # On top of large ones at this goal, the small ones are low enough without any hole.
    large = boxes.those(is_large)
    goal = max(large.load, low_enough - boxes.those(~is_large).load)
    first = Found(*greedy(large, goal))
    whole = _with_small(boxes, is_large, first, low_enough)
    if boxes.top(whole.offsets) <= low_enough:
        return whole
    other = _with_small(boxes, is_large, _searched(large, first, goal), low_enough)
    return min(whole, other, key=lambda found: boxes.top(found.offsets))


def _searched(boxes: Boxes, best: Found, goal: int) -> Found:
    """The lowest of dives at `goal`, then the squeaky wheel from the lowest, then annealing."""
    is_moderate = overlaps_in(boxes) <= MOST_OVERLAPS
    if is_moderate:
        best = _dived(boxes, best, goal)
    rounds = WHEEL_WORK // len(JUMPS) // len(boxes)
    for seed, jump in enumerate(JUMPS):
        if boxes.top(best.offsets) <= goal:
            break
        turned = squeaky_wheel(boxes, best.offsets, goal, rounds=rounds, jump=jump, seed=seed)
        if boxes.top(turned) < boxes.top(best.offsets):
            best = Found(turned, "squeaky wheel")
    return _annealed(boxes, best, goal) if IS_COMPILED and is_moderate else best


def _dived(boxes: Boxes, best: Found, goal: int) -> Found:
    """`best`, or what dives find at `goal`, or somewhat above it."""
    search, share = CanonicalSearch(boxes), max(TRIES, len(boxes) + len(boxes) // 4)
    for part in RELAXED:
        capacity = goal + int(part * boxes.load)
        if capacity >= boxes.top(best.offsets):
            break
        found = dive(search, capacity, share, ALL_TRIES)
        if found.offsets is not None:
            return Found(found.offsets, f"canonical search, {found.preorder.keys}")
    return best


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


def _with_small(boxes: Boxes, is_large: Mask, large: Found, goal: int) -> Found:
    """The small ones into holes between the large ones; the lowest of few orders."""
    if is_large.all():
        return large
    given = np.zeros(len(boxes), np.int64)
    given[is_large] = large.offsets
    best, best_top = given, NO_CEILING
    for order in box_orders(boxes).values():
        small = order[~is_large[order]]
        filled = place_in_order(boxes, small, given=given, ceiling=best_top)
        if filled is not None:
            best, best_top = filled, boxes.top(filled)
        if best_top <= goal:
            break
    return Found(best, large.by)
