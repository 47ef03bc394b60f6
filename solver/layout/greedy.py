"""Greedy placements: box by box in a given order, each into a gap that holds it.

First fit takes the lowest gap, best fit the smallest. Both are as good as their order:
`box_orders` has twenty.
"""

from __future__ import annotations

import numpy as np

from remat.graph_capture.graph import Floats, Ints
from remat.solver.layout.boxes import Boxes


def box_orders(boxes: Boxes) -> dict[str, Ints]:
    """Orders by name, those that do well first; ties go to the next key, at last to the index."""
    size, start, end, length = boxes.size, boxes.start, boxes.end, boxes.length
    by_size = {
        "size": np.lexsort((start, -length, -size)),
        "size, start": np.lexsort((start, -size)),
        "size, end": np.lexsort((-end, -size)),
    }
    others = {
        "length": np.lexsort((start, -size, -length)),
        "area": np.lexsort((start, -_area(boxes))),
        # By start, and by end from the last on, boxes of one size leave no hole in an empty arena:
        # that is the colouring of intervals.
        "start": np.lexsort((-length, start)),
        "start, size": np.lexsort((-size, start)),
        "end": np.lexsort((start, -end)),
    }
    return by_size | _peak_first(boxes) | others


def _peak_first(boxes: Boxes) -> dict[str, Ints]:
    """What is live at the peak first, as a stack without gaps, then the rest."""
    if not len(boxes):
        return {}
    size, start, end, length = boxes.size, boxes.start, boxes.end, boxes.length
    peak = int(boxes.curve.argmax())
    at_peak = (start <= peak) & (peak < end)
    # At the peak no byte may be wasted. With the oldest at the bottom, those live earlier are a
    # prefix of the stack, and where lifetimes nest those live later are one too.
    stacks = {
        "oldest": np.lexsort((-end, start)),
        "longest": np.lexsort((start, -length)),
        "last": np.lexsort((start, -end)),
    }
    rests = {
        "size": np.lexsort((-length, -size)),
        "area": np.lexsort((start, -_area(boxes))),
        "length": np.lexsort((-size, -length)),
        "crowd": np.lexsort((-size, -boxes.crowd)),
    }
    return {
        f"peak by {stack_name}, then {rest_name}": np.concatenate(
            [stack[at_peak[stack]], rest[~at_peak[rest]]]
        )
        for stack_name, stack in stacks.items()
        for rest_name, rest in rests.items()
    }


def _area(boxes: Boxes) -> Floats:
    # Floats, as the products may exceed 64 bits.
    return boxes.length * boxes.size.astype(np.float64)


NO_CEILING = 1 << 62
GREEDY_WORK = 100_000
"""Boxes placed greedily in all: some two seconds of NumPy."""
_LEAST_PLACEMENTS = 6
"""Of however many boxes."""


class _Shelf:
    """Placed boxes, sorted by offset."""

    def __init__(self, capacity: int) -> None:
        self.low, self.high, self.start, self.end = np.empty((4, capacity), np.int64)
        self.count = 0

    def lowest_gap(self, size: int, start: int, end: int, is_best_fit: bool) -> int:
        n = self.count
        live = ((self.start[:n] < end) & (self.end[:n] > start)).nonzero()[0]
        if not live.size:
            return 0
        # Boxes sorted by offset may end above later ones.
        tops = np.maximum.accumulate(self.high[live])
        rooms = self.low[live]
        rooms[1:] -= tops[:-1]
        fits = rooms >= size
        at = int(np.where(fits, rooms, NO_CEILING).argmin() if is_best_fit else fits.argmax())
        if not fits[at]:
            return int(tops[-1])
        return int(tops[at - 1]) if at else 0

    def insert(self, offset: int, size: int, start: int, end: int) -> None:
        n = self.count
        # One pass over four arrays: cheaper than to sort what is live for each box.
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
    """Offsets, or None once one reaches `ceiling`; others than `order` lie where `given` says."""
    offsets = np.zeros(len(boxes), np.int64) if given is None else given.copy()
    shelf = _Shelf(len(boxes))
    # NumPy is slow at reading single elements.
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
    stands = np.ones(len(boxes), np.bool_)
    stands[order] = False
    standing = np.flatnonzero(stands)
    # A shelf is sorted by offset.
    standing = standing[np.argsort(given[standing], kind="stable")]
    n = standing.size
    shelf.low[:n], shelf.high[:n] = given[standing], given[standing] + boxes.size[standing]
    shelf.start[:n], shelf.end[:n] = boxes.start[standing], boxes.end[standing]
    shelf.count = n


def greedy(boxes: Boxes, goal: int) -> tuple[Ints, str]:
    """The lowest placement and its name; the first that does not exceed `goal`."""
    best, name, top = np.zeros(len(boxes), np.int64), "nothing to place", NO_CEILING
    orders = box_orders(boxes).items()
    tried = [(fit, *named) for fit in ("first", "best") for named in orders]
    for fit, order_name, order in tried[: placements_of(boxes)]:
        # Each ends where it can no longer be the lowest.
        found = place_in_order(boxes, order, is_best_fit=fit == "best", ceiling=top)
        if found is not None:
            best, name, top = found, f"{fit} fit, {order_name}", boxes.top(found)
        if top <= goal:
            break
    return best, name


def placements_of(boxes: Boxes) -> int:
    return max(_LEAST_PLACEMENTS, GREEDY_WORK // max(len(boxes), 1))
