"""From buffers to a layout near the most live bytes: a portfolio of placements.

Small buffers wait. The others are placed greedily, by ejections, then by dives of the canonical
search; with Numba, what is still high is annealed. Small ones fill the holes. All limits are of
work. Related: Y. Imanishi and Z. Xu, ISMM 2024; H. Shu et al., arXiv 2310.19295; STAlloc, 2025.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from remat.graph_capture.errors import LayoutError
from remat.graph_capture.graph import MOST_BYTES, Ints
from remat.schedules.layout import Buffers, Layout, check_alignment, check_layout
from remat.solver.layout import heuristics
from remat.solver.layout.boxes import IS_COMPILED, MOST_OVERLAPS, Boxes, Mask, overlaps_in
from remat.solver.layout.canonical import FAILED, FOUND, CanonicalSearch, Preorder

# For training steps, where what starts together is read together.
STEP_PREORDERS = tuple(map(Preorder, ("WAT", "TAW", "TsW", "WTs", "TWA", "TSW", "WTS")))


class Fitted(NamedTuple):
    """`offsets` is None where nothing was found; `is_proved` if nothing exists."""

    offsets: Ints | None
    preorder: Preorder
    tries: int
    is_proved: bool


def dive(
    search: CanonicalSearch, capacity: int, share: int, tries: int,
    preorders: tuple[Preorder, ...] = STEP_PREORDERS,
) -> Fitted:  # fmt: skip
    """`share` tries by each of `preorders`, at most `tries` in all."""
    used = 0
    for preorder in preorders:
        outcome, offsets, more = search.run(capacity, preorder, min(share, tries - used))
        used += more
        if outcome in (FOUND, FAILED):  # a search that ends without a layout has seen all of them
            return Fitted(offsets if outcome == FOUND else None, preorder, used, outcome == FAILED)
        if used == tries:
            break
    return Fitted(None, preorders[-1], used, is_proved=False)


# Ejections, then dives, which want lists of overlaps and more tries for more boxes.

STARTS = (  # orders that ejections begin with, those that do well first
    "peak by last, then crowd", "size, start", "peak by oldest, then crowd",
    "peak by oldest, then area", "size, end", "area", "peak by oldest, then length",
    "peak by longest, then area", "length", "size", "peak by last, then area",
    "peak by oldest, then size",
)  # fmt: skip
STEPS = 600  # of each ejection: another start helps more than more steps
START_WORK, LEAST_STARTS = 100_000, 5  # boxes placed to begin with: two seconds of NumPy

_TRIES = 3500  # placements in each dive, or 1.25 a box: most that succeed take little above one
_ALL_TRIES, DIVE_WORK = 30_000, 30_000_000  # in all dives at the goal, and those times boxes
_RELAXED_PART = 4  # of the dives at the goal, so many as one part are taken above it


class _PlacedOffsets(NamedTuple):
    offsets: Ints
    by: str


class Searches:
    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes

    def within(self, capacity: int, *, is_relaxed: bool) -> _PlacedOffsets | None:
        """What ejections or else dives find within `capacity`; less is tried if it `is_relaxed`."""
        return self._ejected(capacity, is_relaxed) or self._dived(capacity, is_relaxed)

    @functools.cached_property
    def has_few_overlaps(self) -> bool:
        return overlaps_in(self.boxes) <= MOST_OVERLAPS

    @functools.cached_property
    def _starts(self) -> list[_PlacedOffsets]:
        orders = heuristics.box_orders(self.boxes)
        names = STARTS[: max(LEAST_STARTS, START_WORK // len(self.boxes))]
        placed = {name: heuristics.place_in_order(self.boxes, orders[name]) for name in names}
        return [_PlacedOffsets(at, name) for name, at in placed.items() if at is not None]

    @functools.cached_property
    def _canonical(self) -> CanonicalSearch:
        return CanonicalSearch(self.boxes)

    def _ejected(self, capacity: int, is_relaxed: bool) -> _PlacedOffsets | None:
        for seed, start in enumerate(self._starts[:LEAST_STARTS] if is_relaxed else self._starts):
            offsets = heuristics.guided_ejection(
                self.boxes, start.offsets, capacity, steps=STEPS, seed=seed
            )
            if offsets is not None:
                return _PlacedOffsets(offsets, f"guided ejection, {start.by}")
        return None

    def _dived(self, capacity: int, is_relaxed: bool) -> _PlacedOffsets | None:
        n = len(self.boxes)
        share = max(_TRIES, n + n // 4)
        dives = min(_ALL_TRIES, DIVE_WORK // n) // share
        if not dives or not self.has_few_overlaps:
            return None
        tries = share * (-(-dives // _RELAXED_PART) if is_relaxed else dives)
        if (found := dive(self._canonical, capacity, share, tries)).offsets is None:
            return None
        return _PlacedOffsets(found.offsets, f"canonical search, {found.preorder.keys}")


SMALL_PART = 4096  # a buffer below this part of the most live bytes is small
SLACK_PART = 2048  # a placement is low enough at this part of the most live bytes above them, .05 %
_RELAXED = 0.0, 0.0004, 0.004, 0.009, 0.016  # of the load, above the goal if nothing is found at it
_ANNEALING_STEPS, _ANNEALING_WORK = 20_000, 16_000_000  # of each; boxes in all: some seconds
_HOTTEST_PARTS = 300, 300, 500, 200  # of the load, the first temperature of each annealing


def place_buffers(buffers: Buffers, *, alignment_bytes: int = 512) -> Layout:
    """As low a layout as was found, judged; LayoutError if the alignment cannot be kept."""
    check_alignment(alignment_bytes)
    total_bytes = sum(buffers.size_bytes.tolist())
    if total_bytes + len(buffers) * alignment_bytes >= MOST_BYTES:  # offsets fit in 64 bits
        most_bytes = max((MOST_BYTES - total_bytes - 1) // len(buffers), 1)
        raise LayoutError(
            f"give an alignment of at most {1 << most_bytes.bit_length() - 1}, such as 64 for a "
            f"CPU or 512 for CUDA: with {alignment_bytes} bytes, no offsets of {len(buffers)} "
            f"buffers stay below {MOST_BYTES}"
        )
    found = _place(Boxes.of(buffers, alignment_bytes))
    # The end of the last buffer need not be aligned.
    arena_bytes = int((found.offsets + buffers.size_bytes).max(initial=0))
    layout = Layout(
        offsets_bytes=tuple(found.offsets.tolist()), arena_bytes=arena_bytes,
        load_bytes=buffers.load_bytes, alignment_bytes=alignment_bytes,
        buffers_hash=buffers.hash, placed_by=found.by,
    )  # fmt: skip
    check_layout(buffers, layout)
    return layout


def _place(boxes: Boxes) -> _PlacedOffsets:
    is_large = boxes.size * SMALL_PART >= boxes.load
    low_enough = boxes.load + boxes.load // SLACK_PART
    large = boxes.those(is_large)  # on top of these, small ones are low enough without any hole
    goal = max(large.load, low_enough - boxes.those(~is_large).load)
    found = _PlacedOffsets(*heuristics.greedy(large, goal))
    whole = _with_small(boxes, is_large, found, low_enough)
    if large.top(found.offsets) > goal and boxes.top(whole.offsets) > low_enough:
        other = _with_small(boxes, is_large, _searched(large, found, goal), low_enough)
        whole = min(whole, other, key=lambda found: boxes.top(found.offsets))
    if boxes.top(whole.offsets) > low_enough:
        repaired = heuristics.guided_ejection(boxes, whole.offsets, low_enough, steps=STEPS, seed=0)
        whole = whole if repaired is None else _PlacedOffsets(repaired, f"{whole.by}, ejection")
    return whole


def _searched(boxes: Boxes, best: _PlacedOffsets, goal: int) -> _PlacedOffsets:
    searches = Searches(boxes)
    for part in _RELAXED:
        capacity = goal + int(part * boxes.load)
        if capacity >= boxes.top(best.offsets):  # what there is already is no higher
            break
        if (found := searches.within(capacity, is_relaxed=part > 0)) is not None:
            best = found
            break
    return _annealed(boxes, best, goal) if IS_COMPILED and searches.has_few_overlaps else best


def _annealed(boxes: Boxes, best: _PlacedOffsets, goal: int) -> _PlacedOffsets:
    steps = min(_ANNEALING_STEPS, _ANNEALING_WORK // len(boxes))
    for seed, part in enumerate(_HOTTEST_PARTS):
        if boxes.top(best.offsets) <= goal:
            break
        cooled = heuristics.insertion_annealing(
            boxes, best.offsets, goal, steps=steps, hottest=boxes.load / part, seed=seed
        )
        if boxes.top(cooled) < boxes.top(best.offsets):
            best = _PlacedOffsets(cooled, "annealing")
    return best


def _with_small(boxes: Boxes, is_large: Mask, large: _PlacedOffsets, goal: int) -> _PlacedOffsets:
    """The small ones into holes between the large ones; the lowest of few orders."""
    if is_large.all():
        return large
    given = np.zeros(len(boxes), np.int64)
    given[is_large] = large.offsets
    best, best_top = given, heuristics.NO_CEILING
    orders = list(heuristics.box_orders(boxes).values())
    for order in orders[: heuristics.placements_of(boxes)]:
        small = order[~is_large[order]]
        filled = heuristics.place_in_order(boxes, small, given=given, ceiling=best_top)
        if filled is not None:
            best, best_top = filled, boxes.top(filled)
        if best_top <= goal:
            break
    return _PlacedOffsets(best, large.by)
