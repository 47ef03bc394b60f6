"""Placements by heuristics: greedy ones in twenty orders, ejections, annealing over orders."""

from __future__ import annotations

import heapq

import numpy as np

from remat.graph_capture.graph import Floats, Ints
from remat.solver.layout.boxes import Boxes, compiled

# Greedy placements in a given order, into the lowest gap (first fit) or the smallest (best fit).


def box_orders(boxes: Boxes) -> dict[str, Ints]:
    """Those that do well first; ties go to the next key, at last to the index."""
    size, start, end, length = boxes.size, boxes.start, boxes.end, boxes.length
    by_size = {
        "size": np.lexsort((start, -length, -size)),
        "size, start": np.lexsort((start, -size)),
        "size, end": np.lexsort((-end, -size)),
    }
    others = {
        "length": np.lexsort((start, -size, -length)),
        "area": np.lexsort((start, -_area(boxes))),
        # The colouring of intervals: boxes of one size leave no hole in an empty arena.
        "start": np.lexsort((-length, start)),
        "start, size": np.lexsort((-size, start)),
        "end": np.lexsort((start, -end)),
    }
    return by_size | _peak_first(boxes) | others


def _peak_first(boxes: Boxes) -> dict[str, Ints]:
    """What is live at the peak first, without gaps, then the rest."""
    if not len(boxes):
        return {}
    size, start, end, length = boxes.size, boxes.start, boxes.end, boxes.length
    peak = int(boxes.curve.argmax())
    at_peak = (start <= peak) & (peak < end)
    # No byte may be wasted there: with the oldest at the bottom, those live earlier are a prefix.
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
    return boxes.length * boxes.size.astype(np.float64)  # products may exceed 64 bits


NO_CEILING = 1 << 62
GREEDY_WORK = 100_000  # boxes in all: some two seconds of NumPy
_LEAST_PLACEMENTS = 6  # of however many boxes


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
        tops = np.maximum.accumulate(self.high[live])  # some end above later ones
        rooms = self.low[live]
        rooms[1:] -= tops[:-1]
        fits = rooms >= size
        at = int(np.where(fits, rooms, NO_CEILING).argmin() if is_best_fit else fits.argmax())
        if not fits[at]:
            return int(tops[-1])
        return int(tops[at - 1]) if at else 0

    def insert(self, offset: int, size: int, start: int, end: int) -> None:
        n = self.count
        # Cheaper than to sort what is live for each box.
        at = int(self.low[:n].searchsorted(offset, side="right"))
        pairs = (self.low, offset), (self.high, offset + size), (self.start, start), (self.end, end)
        for column, number in pairs:
            column[at + 1 : n + 1] = column[at:n]
            column[at] = number
        self.count = n + 1


def place_in_order(
    boxes: Boxes, order: Ints, *, is_best_fit: bool = False, ceiling: int = NO_CEILING,
    given: Ints | None = None,
) -> Ints | None:  # fmt: skip
    """Offsets, or None once one reaches `ceiling`; others than `order` lie where `given` says."""
    offsets = np.zeros(len(boxes), np.int64) if given is None else given.copy()
    shelf = _Shelf(len(boxes))
    # Reading single elements of NumPy is slow.
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
    standing = standing[np.argsort(given[standing], kind="stable")]  # a shelf is sorted by offset
    n = standing.size
    shelf.low[:n], shelf.high[:n] = given[standing], given[standing] + boxes.size[standing]
    shelf.start[:n], shelf.end[:n] = boxes.start[standing], boxes.end[standing]
    shelf.count = n


def greedy(boxes: Boxes, goal: int) -> tuple[Ints, str]:
    """The lowest placement and its name; the first that does not exceed `goal`."""
    best, name, top = np.zeros(len(boxes), np.int64), "nothing to place", NO_CEILING
    tried = [(fit, *named) for fit in ("first", "best") for named in box_orders(boxes).items()]
    for fit, order_name, order in tried[: placements_of(boxes)]:
        # Each ends where it is no longer the lowest.
        found = place_in_order(boxes, order, is_best_fit=fit == "best", ceiling=top)
        if found is not None:
            best, name, top = found, f"{fit} fit, {order_name}", boxes.top(found)
        if top <= goal:
            break
    return best, name


def placements_of(boxes: Boxes) -> int:
    return max(_LEAST_PLACEMENTS, GREEDY_WORK // max(len(boxes), 1))


# Guided ejection search (Y. Nagata and O. Bräysy, "A powerful route minimization heuristic for the
# vehicle routing problem with time windows", 2009, https://doi.org/10.1016/j.orl.2009.04.006): what
# fits nowhere ejects what is cheapest to place again, and becomes dearer to eject itself.

_GROWTH = 1.3  # of the penalty of a box, each time that it ejects others
MOST_PENALTY = 1e6  # in areas of the largest: sums keep the bits of small ones
_NOISE = 0.3  # by which penalties of places seem higher, so that no round repeats
_NEVER = 1 << 62  # when a box starts that is not placed


class _Arena:
    """Offsets of all boxes, and when those that are placed are live."""

    def __init__(self, boxes: Boxes, offsets: Ints, capacity: int) -> None:
        area = _area(boxes)
        is_placed = offsets + boxes.size <= capacity
        self.boxes, self.capacity, self.offsets = boxes, capacity, offsets.copy()
        self.start = np.where(is_placed, boxes.start, _NEVER)
        self.penalty = area / area.max(initial=1)
        self.rank = np.argsort(np.argsort(-area, kind="stable"), kind="stable").tolist()
        self.waiting = [(self.rank[box], box) for box in np.flatnonzero(~is_placed).tolist()]
        heapq.heapify(self.waiting)

    def put_largest(self, source: np.random.Generator) -> None:
        """It goes where it ejects the least, and that waits again."""
        _, box = heapq.heappop(self.waiting)
        boxes = self.boxes
        size, start, end = int(boxes.size[box]), int(boxes.start[box]), int(boxes.end[box])
        live = ((self.start < end) & (boxes.end > start)).nonzero()[0]
        low, high = self.offsets[live], self.offsets[live] + boxes.size[live]
        offset = _cheapest(low, high, self.penalty[live], size, self.capacity, source)
        ejected = live[(low < offset + size) & (high > offset)]
        self.offsets[box], self.start[box] = offset, start
        if ejected.size:
            self.penalty[box] = min(_GROWTH * self.penalty[box], MOST_PENALTY)
            self.start[ejected] = _NEVER  # never live, so in nobody's way
            for other in ejected.tolist():
                heapq.heappush(self.waiting, (self.rank[other], other))


def guided_ejection(
    boxes: Boxes, offsets: Ints, capacity: int, *, steps: int, seed: int
) -> Ints | None:
    """Offsets within `capacity`, or None if it takes more than `steps`."""
    if boxes.size.max(initial=0) > capacity:
        return None
    source, arena = np.random.default_rng(seed), _Arena(boxes, offsets, capacity)
    for _ in range(steps):
        if not arena.waiting:
            break
        arena.put_largest(source)
    return None if arena.waiting else arena.offsets


def _cheapest(
    low: Ints, high: Ints, penalty: Floats, size: int, capacity: int, source: np.random.Generator
) -> int:
    """The lowest offset at which `size` bytes eject least, on or below what is live or at 0."""
    # What is ejected changes only where boxes end or begin.
    places = np.concatenate([np.zeros(1, np.int64), high, low - size])
    places = np.sort(places[(places >= 0) & (places + size <= capacity)])
    by_low, by_high = np.argsort(low, kind="stable"), np.argsort(high, kind="stable")
    begun = np.searchsorted(low[by_low], places + size, side="left")
    ended = np.searchsorted(high[by_high], places, side="right")
    penalties = _sums(penalty[by_low])[begun] - _sums(penalty[by_high])[ended]
    penalties[begun == ended] = 0  # sums in two orders differ in the last bits
    return int(places[(penalties * (1 + _NOISE * source.random(penalties.size))).argmin()])


def _sums(numbers: Floats) -> Floats:
    """The sum of the first k, for each k."""
    return np.concatenate([np.zeros(1), np.cumsum(numbers)])


# Simulated annealing over orders: Y. Imanishi and Z. Xu, "A Heuristic for Periodic Memory
# Allocation with Little Fragmentation to Train Neural Networks", ISMM 2024,
# https://doi.org/10.1145/3652024.3665507. Boxes fall onto earlier ones. A step puts one where the
# stack through it is low, by two sweeps and noise, as a heat bath: thousands want compiled code.

_CHUNK = 100  # steps whose random numbers are drawn together
_COLDEST = 1e-3  # of the first temperature, the last one


@compiled
def stacked(
    size: Ints, start: Ints, end: Ints, order: Ints, box: int, levels: Ints, heights: Ints
) -> int:
    """Let boxes fall in `order`; the height of all. `levels[k]` becomes the height during the life
    of `box` before the k-th falls, one more after the last; `heights` the ends."""
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
def _anneal_chunk(
    size: Ints, start: Ints, end: Ints, order: Ints, best: Ints, best_top: int,
    picks: Ints, noise: Floats, goal: int,
) -> int:  # fmt: skip
    """One step a pick, from `order` on, in place; the least height, whose order is in `best`."""
    n = order.size
    below, above, heights = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    for step in range(picks.size):
        at = int(picks[step])
        box = int(order[at])
        rest = np.concatenate((order[:at], order[at + 1 :]))
        without = stacked(size, start, end, rest, box, below, heights)
        # A copy: Numba would compile another function for arrays that run backwards.
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
    """The lowest placement found; temperatures are bytes and fall geometrically."""
    source, n = np.random.default_rng(seed), len(boxes)
    order = np.argsort(offsets, kind="stable")
    best, best_top = order.copy(), boxes.top(offsets)
    columns = boxes.size, boxes.start, boxes.end
    temperatures = hottest * _COLDEST ** (np.arange(steps) / steps)
    for first in range(0, steps, _CHUNK):
        hot = temperatures[first : first + _CHUNK, None]
        picks = source.integers(0, n, len(hot))
        # Gumbel noise: the least sum draws a place by its Boltzmann weight. 1e-300 keeps it finite.
        noise = -hot * np.log(-np.log(source.uniform(1e-300, 1.0, (len(hot), n))))
        best_top = _anneal_chunk(*columns, order, best, best_top, picks, noise, goal)
        if best_top <= goal:
            break
    if best_top == boxes.top(offsets):  # falling anew, boxes may come to lie higher
        return offsets
    heights = np.empty(n, np.int64)
    stacked(*columns, best, 0, np.empty(n + 1, np.int64), heights)
    return heights - boxes.size
