"""Cuts of a range, each with a schedule of its own, placed where the overhead changes most.

The schedule of the largest sizes serves all; the step that keeps everything serves up to where it
fits. Between, the part whose ends differ most in overhead is cut in its middle, and so on: a plan
inside a part could save about that much. Whatever serves a size was judged above it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from remat.graph_capture.errors import ScheduleError, TooLargeError
from remat.graph_capture.graph import MOST_BYTES, TrainingGraph
from remat.graph_capture.sizes.ranged_graph import BytesOver, RangedGraph
from remat.graph_capture.sizes.symbols import Sizes, Symbol, corner
from remat.schedules.family import Family, FastPeak, Member, simulate_resized, sizes_text
from remat.schedules.outcome import Result
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import overhead_of
from remat.solver.policies.template import StoreAll
from remat.solver.problem import Problem, least_needed_bytes

# What a schedule serves has no holes, as bytes are bounded below a corner: halves find its border.

_MOST_LEVELS = 256  # from the smallest sizes to the largest, where several vary
_PeakOf = Callable[[tuple[Symbol, ...]], int]  # of a schedule, within a part of the range
_MOST_CORNERS = 16  # of what a schedule serves; more would serve a little more


class Reach:
    def __init__(self, graph: RangedGraph, budget_bytes: int) -> None:
        self.graph, self.budget_bytes = graph, budget_bytes
        self.symbols = graph.symbols
        self.levels = _levels(graph.symbols)  # along them no size falls
        self._bytes = BytesOver(graph)

    def part(self, sizes: Sizes) -> tuple[Symbol, ...]:
        """All sizes that are at most these."""
        return tuple(Symbol(s.name, s.low, sizes[s.name], s.multiple) for s in self.symbols)

    def along(self, schedule: Schedule) -> int:
        """The last level at which it fits; -1 where it fits at none."""
        peak_of = self._peak_of(schedule)
        return _last(len(self.levels), lambda i: self._fits(peak_of, self.levels[i]))

    def evaluated_corners(self, schedule: Schedule) -> tuple[tuple[dict[str, int], ...], int]:
        """Of what it serves, and the most that it needs there, by the simulator."""
        peak_of, peak_bytes = self._peak_of(schedule), 0
        found: list[dict[str, int]] = []
        for one in self._corners(peak_of):
            judged = self._simulated_bytes(schedule, self.part(one))
            if judged <= self.budget_bytes:
                found.append(one)
                peak_bytes = max(peak_bytes, judged)
        return tuple(found), peak_bytes

    def _corners(self, peak_of: _PeakOf) -> list[dict[str, int]]:
        top = corner(self.symbols, "high")
        if self._fits(peak_of, top):
            return [top]
        *leading, last = self.symbols
        # All combinations are about `_MOST_CORNERS`.
        each = max(int(_MOST_CORNERS ** (1 / max(len(leading), 1))), 2)
        found: list[dict[str, int]] = []
        # The largest first: a covered corner comes after.
        for sizes in itertools.product(*(_some(symbol, each)[::-1] for symbol in leading)):
            first = {s.name: size for s, size in zip(leading, sizes, strict=True)}
            i = _last(
                len(last.sizes),
                lambda i, first=first: self._fits(peak_of, {**first, last.name: last.sizes[i]}),
            )
            one = {**first, last.name: last.sizes[i]}
            is_covered = any(all(one[name] <= at for name, at in big.items()) for big in found)
            if i >= 0 and not is_covered:
                found.append(one)
        return found

    def _peak_of(self, schedule: Schedule) -> _PeakOf:
        if schedule.chunks or schedule.moves:  # `BytesOver` knows captured values on the device
            return lambda part: self._simulated_bytes(schedule, part)
        fast = FastPeak(self.graph.base, schedule)
        return lambda part: fast.peak_bytes(self._bytes.of(part))

    def _simulated_bytes(self, schedule: Schedule, part: tuple[Symbol, ...]) -> int:
        try:
            return simulate_resized(self.graph.bounding(part), schedule).peak_bytes
        except ScheduleError:  # its copies have no room below the device at these sizes
            return MOST_BYTES

    def _fits(self, peak_of: _PeakOf, sizes: Sizes) -> bool:
        return peak_of(self.part(sizes)) <= self.budget_bytes


def _last(count: int, holds: Callable[[int], bool]) -> int:
    """The last of 0, 1, ... for which it holds, if it holds for all before it; -1 for none."""
    return bisect_left(range(count), True, key=lambda i: not holds(i)) - 1


def _levels(symbols: Sequence[Symbol]) -> list[dict[str, int]]:
    if len(symbols) == 1:
        return [{symbols[0].name: size} for size in symbols[0].sizes]
    count = min(max(len(symbol.sizes) for symbol in symbols), _MOST_LEVELS)
    ways = [_some(symbol, count, repeated=True) for symbol in symbols]
    points = [dict(zip((s.name for s in symbols), p, strict=True)) for p in zip(*ways, strict=True)]
    return [point for i, point in enumerate(points) if i == 0 or point != points[i - 1]]


def _some(symbol: Symbol, count: int, *, repeated: bool = False) -> list[int]:
    """In geometric steps, both ends included; each once, unless `repeated`."""
    if not repeated and len(symbol.sizes) <= count:
        return list(symbol.sizes)
    ratio = math.log(symbol.high / symbol.low)
    exact = (symbol.low * math.exp(ratio * i / (count - 1)) for i in range(count))
    steps = (round((size - symbol.low) / symbol.multiple) for size in exact)
    found = [symbol.sizes[min(step, len(symbol.sizes) - 1)] for step in steps]
    return found if repeated else list(dict.fromkeys(found))


_MOST_MEMBERS = 10  # of a family; each has code of its own, made when a size needs it
_APART = 0.0075  # overheads of neighbours that are no further apart need no cut between them

_Solve = Callable[[TrainingGraph, int], Result]  # with all options: from a graph and bytes


class _Found(NamedTuple):
    """A schedule: at which level it was made, up to which one it fits."""

    schedule: Schedule
    level: int
    reach: int
    overhead: float
    lower_overhead: float


def plan_family(graph: RangedGraph, budget_bytes: int, solve: _Solve, top: Result | None) -> Family:
    """Schedules that fit at all sizes; else TooLargeError, which names the largest that fit."""
    search = _FamilySearch(graph, budget_bytes, solve)
    search.begin(top or solve(graph.bounding(graph.symbols), budget_bytes))
    search.cut()
    return search.family()


class _FamilySearch:
    def __init__(self, graph: RangedGraph, budget_bytes: int, solve: _Solve) -> None:
        self.graph, self.budget_bytes, self.solve = graph, budget_bytes, solve
        self.reach = Reach(graph, budget_bytes)
        self.levels = self.reach.levels
        self.found: list[_Found] = []

    def begin(self, top: Result) -> None:
        last = len(self.levels) - 1
        keeping = StoreAll().schedule(self.graph.base)
        reach = self.reach.along(keeping)
        if reach >= 0:
            keeping = msgspec.structs.replace(keeping, budget_bytes=self.budget_bytes)
            self.found.append(_Found(keeping, reach, reach, 0.0, 0.0))
        if reach == last:  # nothing is faster than keeping all
            return
        if top.schedule is None:
            raise self._too_large(top)
        self.found.append(self._found(top, last))

    def cut(self) -> None:
        closed: set[tuple[int, int]] = set()
        while len(self.found) < _MOST_MEMBERS:
            pairs = zip(self.found, self.found[1:], strict=False)
            open_pairs = [
                (upper.overhead - lower.overhead, -i, lower, upper)
                for i, (lower, upper) in enumerate(pairs)
                if upper.level - lower.reach > 1 and (lower.reach, upper.level) not in closed
            ]
            if not open_pairs:
                return
            apart, _, lower, upper = max(open_pairs, key=lambda one: one[:2])
            if apart <= _APART:
                return
            closed.add((lower.reach, upper.level))  # only once, even if what is found is not kept
            self._cut_between(lower, upper)

    def _cut_between(self, lower: _Found, upper: _Found) -> None:
        level = (lower.reach + upper.level) // 2
        result = self.solve(self._bounding(level), self.budget_bytes)
        if result.schedule is None:  # the time limit ended it: `upper` serves there
            return
        made = self._found(result, level)
        # `upper` serves there too.
        if made.overhead < simulate_resized(self._bounding(level), upper.schedule).overhead:
            self.found.insert(self.found.index(upper), made)
            self.found = [  # without those that a faster one replaces
                one
                for i, one in enumerate(self.found)
                if not any(other.reach >= one.reach for other in self.found[:i])
            ]

    def _found(self, result: Result, level: int) -> _Found:
        schedule = result.schedule
        assert schedule is not None
        base_us = self._bounding(level).base_us
        lower = min(overhead_of(result.lower_bound_us, base_us), result.overhead)
        reach = max(self.reach.along(schedule), level)  # where it was solved, it fits
        return _Found(schedule, level, reach, result.overhead, lower)

    def _bounding(self, level: int) -> TrainingGraph:
        return self.graph.bounding(self.reach.part(self.levels[level]))

    def family(self) -> Family:
        members: list[Member] = []
        for one in self.found:
            corners, peak_bytes = self.reach.evaluated_corners(one.schedule)
            sizes, overheads = self.levels[one.level], (one.overhead, one.lower_overhead)
            if corners:
                members.append(Member(one.schedule, sizes, corners, peak_bytes, *overheads))
        graph = self.graph
        return Family(
            model=graph.name, symbols=graph.symbols, budget_bytes=self.budget_bytes,
            members=tuple(members), traced_hash=graph.traced_hash,
            certificate="largest sizes" if graph.rising else "bounds of parts",
            cost_error=graph.costs.error_at_middle if graph.points else 0.0,
        )  # fmt: skip

    def _too_large(self, top: Result) -> TooLargeError:
        largest = self._largest()
        top_sizes = self.levels[-1]
        least = f", {top.least_feasible_bytes} are enough" if top.least_feasible_bytes else ""
        ways = (
            f"plan a range up to {sizes_text(largest)}, the largest that fits"
            if largest
            else f"raise the budget: {sizes_text(self.levels[0])}, the smallest, does not fit"
        )
        return TooLargeError(
            f"{ways}. No schedule of {self.graph.name} at {sizes_text(top_sizes)} was found within "
            f"{self.budget_bytes} bytes{least}",
            largest or {},
            self.budget_bytes,
        )

    def _largest(self) -> Sizes | None:
        """The largest level for which a schedule is found, by halves."""
        low, high = -1, len(self.levels) - 1
        if self.found:
            low = self.found[0].reach
        while high - low > 1:
            level = (low + high) // 2
            at = self._bounding(level)
            result = None
            # No solve where one op exceeds the budget.
            if least_needed_bytes(Problem.of(at)) <= self.budget_bytes:
                result = self.solve(at, self.budget_bytes)
            if result is not None and result.schedule is not None:
                low = max(level, self.reach.along(result.schedule))
            else:
                high = level
        return self.levels[low] if low >= 0 else None
