"""How far a schedule reaches in a range of sizes: where its peak is within a budget.

The set of such sizes has no holes below its border, since bytes are bounded for all sizes below a
corner. So the border is found by halves, in the fast books, and its corners are then judged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from remat.graph_capture.shapes.bytes_over import BytesOver
from remat.graph_capture.shapes.ranged_graph import RangedGraph
from remat.graph_capture.shapes.ranges import Sizes, Symbol, corner
from remat.schedules.fast_peak import FastPeak
from remat.schedules.over_range import carried
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate

MOST_LEVELS = 256
"""Points on the way from the smallest sizes to the largest, where several sizes vary."""
MOST_CORNERS = 16
"""Corners of the part that a schedule serves. A few more would serve a little more."""


class Reach:
    """Where in a range schedules fit a budget.

    Attributes
    ----------
    levels : points from the smallest sizes to the largest, along which no size falls.
    """

    def __init__(self, graph: RangedGraph, budget_bytes: int) -> None:
        self.graph, self.budget_bytes = graph, budget_bytes
        self.symbols = graph.symbols
        self.levels = _levels(graph.symbols)
        self._bytes = BytesOver(graph)

    def part(self, sizes: Sizes) -> tuple[Symbol, ...]:
        """All sizes that are at most these."""
        return tuple(Symbol(s.name, s.low, sizes[s.name], s.multiple) for s in self.symbols)

    def along(self, schedule: Schedule) -> int:
        """The last level at which it fits; -1 where it fits at none."""
        fast = FastPeak(self.graph.base, schedule)
        return _last(len(self.levels), lambda i: self._fits(fast, self.levels[i]))

    def judged_corners(self, schedule: Schedule) -> tuple[tuple[dict[str, int], ...], int]:
        """Corners of what it serves, and the most that it needs there, by the judge."""
        fast, peak_bytes = FastPeak(self.graph.base, schedule), 0
        found: list[dict[str, int]] = []
        for one in self._corners(fast):
            bounding = self.graph.bounding(self.part(one))
            judged = simulate(bounding, carried(schedule, bounding)).peak_bytes
            if judged <= self.budget_bytes:
                found.append(one)
                peak_bytes = max(peak_bytes, judged)
        return tuple(found), peak_bytes

    def _corners(self, fast: FastPeak) -> list[dict[str, int]]:
        top = corner(self.symbols, "high")
        if self._fits(fast, top):
            return [top]
        *leading, last = self.symbols
        each = max(int(MOST_CORNERS ** (1 / max(len(leading), 1))), 2)
        found: list[dict[str, int]] = []
        # The largest first, so that a corner that another one covers comes after it.
        for sizes in itertools.product(*(_some(symbol, each)[::-1] for symbol in leading)):
            first = {s.name: size for s, size in zip(leading, sizes, strict=True)}
            i = _last(
                len(last.sizes),
                lambda i, first=first: self._fits(fast, {**first, last.name: last.sizes[i]}),
            )
            one = {**first, last.name: last.sizes[i]}
            if i >= 0 and not any(_is_below(one, other) for other in found):
                found.append(one)
        return found

    def _fits(self, fast: FastPeak, sizes: Sizes) -> bool:
        return fast.peak_bytes(self._bytes.of(self.part(sizes))) <= self.budget_bytes


def _is_below(one: Sizes, other: Sizes) -> bool:
    return all(size <= other[name] for name, size in one.items())


def _last(count: int, holds: Callable[[int], bool]) -> int:
    """The last of 0, 1, ... for which it holds, if it holds for all before it; -1 for none."""
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _levels(symbols: Sequence[Symbol]) -> list[dict[str, int]]:
    if len(symbols) == 1:
        return [{symbols[0].name: size} for size in symbols[0].sizes]
    count = min(max(len(symbol.sizes) for symbol in symbols), MOST_LEVELS)
    ways = [_some(symbol, count, repeated=True) for symbol in symbols]
    points = [dict(zip((s.name for s in symbols), p, strict=True)) for p in zip(*ways, strict=True)]
    return [point for i, point in enumerate(points) if i == 0 or point != points[i - 1]]


def _some(symbol: Symbol, count: int, *, repeated: bool = False) -> list[int]:
    """So many sizes in geometric steps, both ends included; each once, unless `repeated`."""
    if not repeated and len(symbol.sizes) <= count:
        return list(symbol.sizes)
    ratio = math.log(symbol.high / symbol.low)
    exact = (symbol.low * math.exp(ratio * i / (count - 1)) for i in range(count))
    steps = (round((size - symbol.low) / symbol.multiple) for size in exact)
    found = [symbol.sizes[min(step, len(symbol.sizes) - 1)] for step in steps]
    return found if repeated else list(dict.fromkeys(found))
