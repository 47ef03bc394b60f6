"""A schedule at all sizes of a range: its steps at another size, and its most bytes at any.

The structure of a step is the same at all sizes, so that the same steps are valid. While one runs,
the bytes live are a sum of what batch, values and a workspace take. If none of these falls where a
size grows, no size needs more than the largest ones, and the judge's peak there bounds the range.
Else the range is split, until what the judge says of the bounds of a part is no more than what some
size needs: branch and bound (Land and Doig 1960, https://doi.org/10.2307/1910129).
"""

from __future__ import annotations

import heapq
import re
from typing import Literal

import msgspec

from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.shapes.ranged_graph import RangedGraph
from remat.graph_capture.shapes.ranges import Symbol, corner, number_of_points, points
from remat.schedules.as_planned import check_are_graph_and_schedule, in_pieces
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate

MOST_SIMULATED = 512
"""Sizes, or parts of a range, at which a schedule is judged where the largest do not bound all."""
_SHAPE = re.compile(r"\[[\d, ]*\]")

Proof = Literal["largest sizes", "every size", "parts"]


class RangePeak(msgspec.Struct, frozen=True):
    """What bounds the peak of a schedule at every size of a range.

    Attributes
    ----------
    peak_bytes : no size has a higher one. sizes : at which it is reached.
    proof : ``largest sizes`` where no value, batch or workspace takes more at a smaller size, so
        that the peak at the largest sizes is that of the range; ``every size`` where each of
        `n_sizes` was judged; ``parts`` where parts of the range were, with bounds of their bytes.
    """

    peak_bytes: int
    sizes: dict[str, int]
    proof: Proof
    n_sizes: int

    def __repr__(self) -> str:
        at = ", ".join(f"{name} = {size}" for name, size in self.sizes.items())
        how = {
            "largest sizes": "the largest sizes bound",
            "every size": "each judged of",
            "parts": "bounds of parts hold for",
        }[self.proof]
        return f"RangePeak({self.peak_bytes} bytes at {at}; {how} {self.n_sizes} sizes)"


def carried(schedule: Schedule, graph: TrainingGraph) -> Schedule:
    """The steps of `schedule` for `graph`: the same step of a model, at other sizes.

    Raises
    ------
    ScheduleError : it was made for other ops or values, or `graph` runs no region in its pieces.
    """
    check_are_graph_and_schedule(graph, schedule)
    if graph.hash in (schedule.graph_hash, schedule.captured_hash):
        return schedule
    captured_hash = graph.hash if schedule.pieces else ""
    graph = in_pieces(graph, schedule.pieces) if schedule.pieces else graph
    mine, theirs = _structure(schedule.signatures), _structure(graph.signatures)
    if mine != theirs:
        pairs = zip(mine, theirs, strict=False)
        first = next((f"'{a}', is '{b}'" for a, b in pairs if a != b), "of another number of ops")
        raise ScheduleError(
            f"this plan was made for other ops than those of the range: first {first}. Solve on "
            "graph.at(...) of the range that it is to run at"
        )
    return msgspec.structs.replace(
        schedule, graph_hash=graph.hash, inputs=graph.inputs, signatures=graph.signatures,
        captured_hash=captured_hash,
    )  # fmt: skip


def _structure(signatures: tuple[str, ...]) -> list[str]:
    return [_SHAPE.sub("[]", line) for line in signatures]


def peak_over(
    graph: RangedGraph, schedule: Schedule, symbols: tuple[Symbol, ...] | None = None
) -> RangePeak:
    """The most bytes that `schedule` needs at any size of a range, proved.

    Workspaces count as `RangedGraph.at` gives them.

    Parameters
    ----------
    symbols : a part of the graph's range; None for all of it.

    Raises
    ------
    ScheduleError : it was made for other ops; or sizes that are not the largest may need more, and
        there are too many to judge each.
    """
    if not isinstance(graph, RangedGraph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(
            f"a peak over a range is one of a graph over a range, and this is "
            f"{type(graph).__name__}: pass what remat.capture(..., dynamic=...) returned"
        )
    symbols = symbols or graph.symbols
    number = number_of_points(symbols)
    if graph.rising:
        top = corner(symbols, "high")
        return RangePeak(_peak_bytes(graph, schedule, top), top, "largest sizes", number)
    if number > MOST_SIMULATED:
        return _by_parts(graph, schedule, symbols)
    found = ((_peak_bytes(graph, schedule, sizes), sizes) for sizes in points(symbols))
    peak_bytes, sizes = max(found, key=lambda one: one[0])
    return RangePeak(peak_bytes, sizes, "every size", number)


def _by_parts(graph: RangedGraph, schedule: Schedule, symbols: tuple[Symbol, ...]) -> RangePeak:
    """Judge the part with the highest bound, and split it, until some size reaches its bound."""
    number = number_of_points(symbols)
    best, best_sizes = 0, corner(symbols, "high")
    heap = [(-_bound_bytes(graph, schedule, symbols), 0, symbols)]
    for n in range(1, MOST_SIMULATED):
        bound, _, part = heapq.heappop(heap)
        top = corner(part, "high")
        peak_bytes = _peak_bytes(graph, schedule, top)
        if peak_bytes > best:
            best, best_sizes = peak_bytes, top
        if -bound <= best:
            return RangePeak(best, best_sizes, "parts", number)
        for i, half in enumerate(_halves(part)):
            heapq.heappush(heap, (-_bound_bytes(graph, schedule, half), 2 * n + i, half))
    falls = next(iter(graph.not_rising()))
    raise ScheduleError(
        f"the bytes of {falls} may fall where a size grows, so that the largest sizes do not bound "
        f"the range, and {MOST_SIMULATED} parts of its {number} sizes do not settle it: capture at "
        f"most {MOST_SIMULATED} sizes, or multiples: (name, least, largest, multiple)"
    )


def _bound_bytes(graph: RangedGraph, schedule: Schedule, part: tuple[Symbol, ...]) -> int:
    bounding = graph.bounding(part)
    return simulate(bounding, carried(schedule, bounding)).peak_bytes


def _halves(part: tuple[Symbol, ...]) -> list[tuple[Symbol, ...]]:
    """The part cut in two along the size that has most of them."""
    widest = max(part, key=lambda symbol: len(symbol.sizes))
    sizes = widest.sizes
    middle = len(sizes) // 2
    ends = [(widest.low, sizes[middle - 1]), (sizes[middle], widest.high)]
    return [
        tuple(Symbol(s.name, *end, s.multiple) if s is widest else s for s in part) for end in ends
    ]


def _peak_bytes(graph: RangedGraph, schedule: Schedule, sizes: dict[str, int]) -> int:
    at = graph.at(**sizes)
    return simulate(at, carried(schedule, at)).peak_bytes
