"""Placements within a capacity of what greedy placements leave too high: ejections, then dives.

Ejections take little and any number of boxes. Dives of the canonical search want lists of overlaps,
and their tries grow with the boxes, so of many boxes there are few of them or none.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from remat.solver.layout.box_orders import box_orders
from remat.solver.layout.boxes import Boxes, Ints
from remat.solver.layout.canonical import CanonicalSearch
from remat.solver.layout.capacity import dive
from remat.solver.layout.greedy import place_in_order
from remat.solver.layout.guided_ejection import guided_ejection
from remat.solver.layout.sections import MOST_OVERLAPS, overlaps_in

STARTS = (
    "peak by last, then crowd", "size, start", "peak by oldest, then crowd",
    "peak by oldest, then area", "size, end", "area", "peak by oldest, then length",
    "peak by longest, then area", "length", "size", "peak by last, then area",
    "peak by oldest, then size",
)  # fmt: skip
"""Orders whose placements ejections begin with, those that do well first."""
STEPS = 600
"""Of each ejection: most that succeed take less, and another start helps more than more steps."""
START_WORK, LEAST_STARTS = 100_000, 5
"""Boxes placed to begin with, up to two seconds of NumPy, and starts of however many boxes."""

TRIES = 3500
"""Placements tried in each dive, or 1.25 a box: most that succeed take little above one a box."""
ALL_TRIES, DIVE_WORK = 30_000, 30_000_000
"""Placements tried in all dives at the goal, and those times boxes: some two seconds of NumPy."""
RELAXED_PART = 4
"""Of the dives at the goal, so many as one part are taken above it."""


class Found(NamedTuple):
    """Offsets, and what found them."""

    offsets: Ints
    by: str


class Searches:
    """Searches of one set of boxes, one at least, at any capacity."""

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes

    def within(self, capacity: int, *, is_relaxed: bool) -> Found | None:
        """What ejections or else dives find within `capacity`; less is tried if it `is_relaxed`."""
        return self._ejected(capacity, is_relaxed) or self._dived(capacity, is_relaxed)

    @functools.cached_property
    def has_few_overlaps(self) -> bool:
        """Whether lists of overlaps are short enough to be made."""
        return overlaps_in(self.boxes) <= MOST_OVERLAPS

    @functools.cached_property
    def _starts(self) -> list[Found]:
        """Placements to begin with, and their orders; fewer of many boxes."""
        orders = box_orders(self.boxes)
        names = STARTS[: max(LEAST_STARTS, START_WORK // len(self.boxes))]
        placed = {name: place_in_order(self.boxes, orders[name]) for name in names}
        return [Found(offsets, name) for name, offsets in placed.items() if offsets is not None]

    @functools.cached_property
    def _canonical(self) -> CanonicalSearch:
        return CanonicalSearch(self.boxes)

    def _ejected(self, capacity: int, is_relaxed: bool) -> Found | None:
        """What ejections find from one start after the other."""
        starts = self._starts[:LEAST_STARTS] if is_relaxed else self._starts
        for seed, start in enumerate(starts):
            offsets = guided_ejection(self.boxes, start.offsets, capacity, steps=STEPS, seed=seed)
            if offsets is not None:
                return Found(offsets, f"guided ejection, {start.by}")
        return None

    def _dived(self, capacity: int, is_relaxed: bool) -> Found | None:
        """What dives find by one preorder after the other."""
        n = len(self.boxes)
        share = max(TRIES, n + n // 4)
        dives = min(ALL_TRIES, DIVE_WORK // n) // share
        if not dives or not self.has_few_overlaps:
            return None
        tries = share * (-(-dives // RELAXED_PART) if is_relaxed else dives)
        found = dive(self._canonical, capacity, share, tries)
        if found.offsets is None:
            return None
        return Found(found.offsets, f"canonical search, {found.preorder.keys}")
