"""From buffers to a layout near the most live bytes: a portfolio of placements.

Related: Y. Imanishi and Z. Xu, "A Heuristic for Periodic Memory Allocation with Little
Fragmentation to Train Neural Networks", ISMM 2024; H. Shu et al., "ROAM: Memory-Efficient Large
DNN Training via Optimized Operator Ordering and Memory Layout", 2023, arXiv 2310.19295; STAlloc,
2025, arXiv 2507.16274.

In order: small buffers, half of a step's and a thousandth of its bytes, wait. The others are placed
greedily, then by ejections, then by dives of the canonical search, until they are near their most
live bytes; where Numba is installed, what is still high is annealed. The small ones fill the holes,
and if some end too high, ejections of all are tried. All limits are of work, so the same buffers
get the same layout.
"""

from __future__ import annotations

import numpy as np

from remat.graph_capture.errors import LayoutError
from remat.graph_capture.graph_rules import MOST_BYTES
from remat.schedules.buffers import Buffers
from remat.schedules.layout import Layout, check_alignment, check_layout
from remat.solver.layout.box_orders import box_orders
from remat.solver.layout.boxes import Boxes, Mask
from remat.solver.layout.greedy import NO_CEILING, greedy, place_in_order, placements_of
from remat.solver.layout.guided_ejection import guided_ejection
from remat.solver.layout.insertion_annealing import insertion_annealing
from remat.solver.layout.jit import IS_COMPILED
from remat.solver.layout.searching import STEPS, Found, Searches

SMALL_PART = 4096
"""A buffer below this part of the most live bytes is small."""
SLACK_PART = 2048
"""A placement is low enough at this part of the most live bytes above them, .05 %."""
RELAXED = 0.0, 0.0004, 0.004, 0.009, 0.016
"""Of the load: by how much searches may be above the goal, if nothing is found at it."""
ANNEALING_STEPS, ANNEALING_WORK = 20_000, 16_000_000
"""Steps of each annealing, and boxes in all of them: some seconds of compiled code."""
HOTTEST_PARTS = 300, 300, 500, 200
"""Of the load, the first temperature of each annealing."""


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
    found = Found(*greedy(large, goal))
    whole = _with_small(boxes, is_large, found, low_enough)
    if large.top(found.offsets) > goal and boxes.top(whole.offsets) > low_enough:
        other = _with_small(boxes, is_large, _searched(large, found, goal), low_enough)
        whole = min(whole, other, key=lambda found: boxes.top(found.offsets))
    if boxes.top(whole.offsets) > low_enough:
        repaired = guided_ejection(boxes, whole.offsets, low_enough, steps=STEPS, seed=0)
        whole = whole if repaired is None else Found(repaired, f"{whole.by}, ejection")
    return whole


def _searched(boxes: Boxes, best: Found, goal: int) -> Found:
    """The lowest of searches at `goal` or somewhat above it, then of annealing."""
    searches = Searches(boxes)
    for part in RELAXED:
        capacity = goal + int(part * boxes.load)
        if capacity >= boxes.top(best.offsets):
            break
        found = searches.within(capacity, is_relaxed=part > 0)
        if found is not None:
            best = found
            break
    return _annealed(boxes, best, goal) if IS_COMPILED and searches.has_few_overlaps else best


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
    for order in list(box_orders(boxes).values())[: placements_of(boxes)]:
        small = order[~is_large[order]]
        filled = place_in_order(boxes, small, given=given, ceiling=best_top)
        if filled is not None:
            best, best_top = filled, boxes.top(filled)
        if best_top <= goal:
            break
    return Found(best, large.by)
