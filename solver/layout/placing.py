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
from remat.solver.layout.greedy import NO_CEILING, greedy, place_in_order, placements_of
from remat.solver.layout.guided_ejection import guided_ejection
from remat.solver.layout.insertion_annealing import insertion_annealing
from remat.solver.layout.jit import IS_COMPILED
from remat.solver.layout.sections import MOST_OVERLAPS, overlaps_in

SMALL_PART = 4096
"""A buffer below this part of the most live bytes is small."""
SLACK_PART = 2048
"""A placement is low enough at this part of the most live bytes above them, .05 %."""
TRIES = 3500
"""Placements tried in each dive, or 1.25 a box: most that succeed take little above one a box."""
ALL_TRIES, DIVE_WORK = 30_000, 30_000_000
"""Placements tried in all dives at the goal, and those times boxes: some two seconds of NumPy."""
RELAXED = 0.0, 0.0004, 0.004, 0.016
"""Of the load: by how much searches may be above the goal, if nothing is found at it."""
RELAXED_PART = 4
"""Of the dives at the goal, so many as one part are taken above it."""
STARTS = (
    "peak by last, then crowd", "size, start", "peak by oldest, then crowd",
    "peak by oldest, then area", "size, end", "area", "peak by oldest, then length",
    "peak by longest, then area", "length", "size", "peak by last, then area",
    "peak by oldest, then size",
)  # fmt: skip
"""Orders whose placements ejections begin with, those that do well first."""
STEPS = 600
"""Of each ejection: most that succeed take less, and another start helps more than more steps."""
START_WORK, LEAST_STARTS = 60_000, 5
"""Boxes placed to begin with, about a second of NumPy, and starts of however many boxes."""

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
    """The lowest of ejections and dives at `goal` or somewhat above it, then of annealing."""
    is_moderate = overlaps_in(boxes) <= MOST_OVERLAPS
    starts = _starts(boxes)
    search = CanonicalSearch(boxes) if is_moderate else None
    for part in RELAXED:
        capacity = goal + int(part * boxes.load)
        if capacity >= boxes.top(best.offsets):
            break
        found = _ejected(boxes, starts, capacity, part > 0) or _dived(search, capacity, part > 0)
        if found is not None:
            best = found
            break
    return _annealed(boxes, best, goal) if IS_COMPILED and is_moderate else best


def _starts(boxes: Boxes) -> list[Found]:
    """Placements to begin with, and their orders; fewer of many boxes."""
    orders = box_orders(boxes)
    names = STARTS[: max(LEAST_STARTS, START_WORK // len(boxes))]
    placed = {name: place_in_order(boxes, orders[name]) for name in names}
    return [Found(offsets, name) for name, offsets in placed.items() if offsets is not None]


def _ejected(
    boxes: Boxes, starts: list[Found], capacity: int, is_relaxed: bool
) -> Found | None:
    """What ejections find within `capacity`, from one start after the other."""
    most = LEAST_STARTS if is_relaxed else len(starts)
    for seed, start in enumerate(starts[:most]):
        offsets = guided_ejection(boxes, start.offsets, capacity, steps=STEPS, seed=seed)
        if offsets is not None:
            return Found(offsets, f"guided ejection, {start.by}")
    return None


def _dived(search: CanonicalSearch | None, capacity: int, is_relaxed: bool) -> Found | None:
    """What dives find within `capacity`; fewer of many boxes, and of those above the goal."""
    if search is None:
        return None
    n = len(search.sections.size)
    share = max(TRIES, n + n // 4)
    dives = min(ALL_TRIES, DIVE_WORK // n) // share
    if is_relaxed:
        dives = -(-dives // RELAXED_PART)
    found = dive(search, capacity, share, share * dives)
    if found.offsets is None:
        return None
    return Found(found.offsets, f"canonical search, {found.preorder.keys}")


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
