"""Greedy placements: box by box in a given order, each into a gap that holds it.

First fit takes the lowest gap, best fit the smallest. Both are as good as their order:
`solver/layout/box_orders.py` has twenty.
"""

from __future__ import annotations

import numpy as np

from remat.solver.layout.box_orders import box_orders
from remat.solver.layout.boxes import Boxes, Ints

NO_CEILING = 1 << 62
GREEDY_WORK = 100_000
"""Boxes placed greedily in all: some two seconds of NumPy."""
LEAST_PLACEMENTS = 6
"""Of however many boxes."""


class _Shelf:
    """Placed boxes, sorted by offset."""

    def __init__(self, capacity: int) -> None:
        self.low, self.high, self.start, self.end = np.empty((4, capacity), np.int64)
        self.count = 0

    def lowest_gap(self, size: int, start: int, end: int, is_best_fit: bool) -> int:
        """Offset of the gap for `size` bytes among what is live in [start, end)."""
        n = self.count
        live = ((self.start[:n] < end) & (self.end[:n] > start)).nonzero()[0]
        if not live.size:
            return 0
        tops = np.maximum.accumulate(self.high[live])
        rooms = self.low[live]
        rooms[1:] -= tops[:-1]
        fits = rooms >= size
        at = int(np.where(fits, rooms, NO_CEILING).argmin() if is_best_fit else fits.argmax())
        if not fits[at]:
            return int(tops[-1])
        return int(tops[at - 1]) if at else 0

    def insert(self, offset: int, size: int, start: int, end: int) -> None:
        """One pass over four arrays: cheaper than to sort what is live for each box."""
        n = self.count
        at = int(self.low[:n].searchsorted(offset, side="right"))
        pairs = (self.low, offset), (self.high, offset + size), (self.start, start), (self.end, end)
        for column, number in pairs:
            column[at + 1 : n + 1] = column[at:n]
            column[at] = number
        self.count = n + 1


def place_in_order(
    boxes: Boxes,
    order: Ints,
    *,
    is_best_fit: bool = False,
    ceiling: int = NO_CEILING,
    given: Ints | None = None,
) -> Ints | None:
    """Offsets of all boxes, or None as soon as one reaches `ceiling`.

    Boxes that are not in `order` lie at their offsets in `given`.
    """
    offsets = np.zeros(len(boxes), np.int64) if given is None else given.copy()
    shelf = _Shelf(len(boxes))
    columns = boxes.size.tolist(), boxes.start.tolist(), boxes.end.tolist()
    if given is not None:
        _stand(shelf, boxes, given, order)
    for i in order.tolist():
        size, start, end = columns[0][i], columns[1][i], columns[2][i]
        offset = shelf.lowest_gap(size, start, end, is_best_fit)
        if offset + size >= ceiling:
            return None
        offsets[i] = offset
        shelf.insert(offset, size, start, end)
    return offsets


def _stand(shelf: _Shelf, boxes: Boxes, given: Ints, order: Ints) -> None:
    """Put what is not in `order` where it is given."""
    stands = np.ones(len(boxes), np.bool_)
    stands[order] = False
    standing = np.flatnonzero(stands)
    standing = standing[np.argsort(given[standing], kind="stable")]
    n = standing.size
    shelf.low[:n], shelf.high[:n] = given[standing], given[standing] + boxes.size[standing]
    shelf.start[:n], shelf.end[:n] = boxes.start[standing], boxes.end[standing]
    shelf.count = n


def greedy(boxes: Boxes, goal: int) -> tuple[Ints, str]:
    """The lowest of 40 placements and its name; the first that does not exceed `goal`.

    Each ends where it can no longer be the lowest. Of many boxes there are fewer placements.
    """
    best, name, top = np.zeros(len(boxes), np.int64), "nothing to place", NO_CEILING
    orders = box_orders(boxes).items()
    tried = [(fit, *named) for fit in ("first", "best") for named in orders]
    for fit, order_name, order in tried[: placements_of(boxes)]:
        found = place_in_order(boxes, order, is_best_fit=fit == "best", ceiling=top)
        if found is not None:
            best, name, top = found, f"{fit} fit, {order_name}", boxes.top(found)
        if top <= goal:
            break
    return best, name


def placements_of(boxes: Boxes) -> int:
    """How many greedy placements there may be of so many boxes."""
    return max(LEAST_PLACEMENTS, GREEDY_WORK // max(len(boxes), 1))
