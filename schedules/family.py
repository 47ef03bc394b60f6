"""A family of schedules for one range of sizes: the size of a batch picks the one that runs.

A member serves every size that is not above one of its corners, as values take no more bytes there.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from remat.formats import bytes_text, percent_text
from remat.graph_capture.errors import PlanError, RematError, ScheduleError
from remat.graph_capture.files import Record
from remat.graph_capture.graph import Ints, TrainingGraph
from remat.graph_capture.sizes.ranged_graph import PartBytes, RangedGraph
from remat.graph_capture.sizes.symbols import (
    Sizes,
    Symbol,
    corner,
    number_of_points,
    points,
    require_in_range,
)
from remat.schedules.derived import check_are_graph_and_schedule, in_chunks
from remat.schedules.schedule import Compute, Schedule, arriving_values, freed_value
from remat.schedules.simulate import Simulation, simulate

_SHOWN = 2  # corners of a member that a family's text shows
_Certificate = Literal["largest sizes", "bounds of parts"]


class Member(msgspec.Struct, frozen=True):
    """One schedule of a family.

    Attributes
    ----------
    schedule : made at `sizes`. corners : it serves each size that is at most one of these.
    peak_bytes : no size that it serves needs more; the simulator said so at the corners.
    overhead : at `sizes`, as a fraction. lower_overhead : what no schedule is proved to beat there.
    """

    schedule: Schedule
    sizes: dict[str, int]
    corners: tuple[dict[str, int], ...]
    peak_bytes: int
    overhead: float
    lower_overhead: float

    def serves(self, sizes: Sizes) -> bool:
        """Whether its peak is proved to be within the budget at these sizes."""
        return any(all(sizes[name] <= at for name, at in one.items()) for one in self.corners)


class Family(Record, frozen=True, dict=True):
    """Schedules of one trace whose peaks are within a budget, one for each part of a range.

    Attributes
    ----------
    model : its class. symbols : the range. budget_bytes : on the peak, at every size.
    members : the one with least recomputation first; the last one serves the whole range.
    certificate : why a corner bounds the sizes below it. ``largest sizes``: no value takes fewer
        bytes where a size grows. ``bounds of parts``: some may, and each was judged at the most
        that it can take at any size below the corner.
    cost_error : how far fitted costs of the step are from the measured ones at the middle.
    traced_hash : of the trace, by which it is traced again.
    """

    noun: ClassVar[str] = "family of schedules"
    again: ClassVar[str] = Schedule.again
    error: ClassVar[type[RematError]] = PlanError
    model: str
    symbols: tuple[Symbol, ...]
    budget_bytes: int
    members: tuple[Member, ...]
    certificate: _Certificate = "largest sizes"
    cost_error: float = msgspec.field(default=0.0, name="prices_error")
    traced_hash: str = ""

    @property
    def top(self) -> Member:
        """The member that serves all sizes."""
        return self.members[-1]

    @property
    def peak_bytes(self) -> int:
        """No size of the range needs more with the member that serves it."""
        return max(member.peak_bytes for member in self.members)

    def number_at(self, **sizes: int) -> int:
        """The number of the first member that serves these sizes; SignatureError: out of range."""
        point = require_in_range(self.symbols, sizes)
        # The last member serves every size of the range.
        return next(i for i, member in enumerate(self.members) if member.serves(point))

    def at(self, **sizes: int) -> Member:
        """Errors as of `number_at`."""
        return self.members[self.number_at(**sizes)]

    def compiled_pick(self) -> Callable[..., int]:
        """From sizes in the order of `symbols` to a member's number, undefined out of the range."""
        lines = [f"def pick({', '.join(symbol.name for symbol in self.symbols)}):"]
        for i, member in enumerate(self.members[:-1]):
            boxes = (" and ".join(f"{n} <= {at}" for n, at in c.items()) for c in member.corners)
            lines.append(f"    if {' or '.join(f'({box})' for box in boxes)}:\n        return {i}")
        lines.append(f"    return {len(self.members) - 1}\n")
        space: dict[str, Any] = {}  # called at every step, so it is compiled to plain comparisons
        exec(compile("\n".join(lines), "<remat family>", "exec"), space)
        return space["pick"]

    def __str__(self) -> str:
        rows = [_member_row(member, self.symbols) for member in self.members]
        return "\n".join([repr(self), *rows])

    def __repr__(self) -> str:
        ranges = ", ".join(map(str, self.symbols))
        return (
            f"Family({self.model}: {ranges}; {len(self.members)} schedules, peak "
            f"{bytes_text(self.peak_bytes)} of {bytes_text(self.budget_bytes)} at every size, by "
            f"the {self.certificate}; costs at the middle {percent_text(self.cost_error)} off)"
        )


def _member_row(member: Member, symbols: Sequence[Symbol]) -> str:
    if member.corners == (corner(symbols, "high"),):
        up_to = "all"
    else:
        up_to = " or ".join(sizes_text(one) for one in member.corners[:_SHOWN])
        if len(member.corners) > _SHOWN:
            up_to = f"{up_to} and {len(member.corners) - _SHOWN} more corners"
    counts = member.schedule.computations()
    again = sum(counts.values()) - len(counts)
    return (
        f"  up to {up_to}: overhead {percent_text(member.overhead)} at {sizes_text(member.sizes)}, "
        f"bound {percent_text(member.lower_overhead)}, {again} ops again, "
        f"peak {bytes_text(member.peak_bytes)}"
    )


def sizes_text(sizes: Sizes) -> str:
    """``batch 4, seq 512``."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


# The same steps are valid at all sizes. If no batch, value or workspace takes less where a size
# grows, `simulate`'s peak at the largest sizes bounds the range. Else it is split by branch and
# bound (Land and Doig 1960, https://doi.org/10.2307/1910129) over `simulate`'s bounds of parts.

_MOST_SIMULATED = 512
"""Sizes, or parts of a range, that are judged where the largest do not bound all."""
_SHAPE = re.compile(r"\[[\d, ]*\]")

_Proof = Literal["largest sizes", "every size", "parts"]


class RangePeak(msgspec.Struct, frozen=True):
    """What bounds the peak of a schedule at every size of a range; it is reached at `sizes`.

    `proof`: ``largest sizes`` if nothing takes more at a smaller size; ``every size`` if each of
    `n_sizes` was judged; ``parts`` if parts of the range were, with bounds of their bytes.
    """

    peak_bytes: int
    sizes: dict[str, int]
    proof: _Proof
    n_sizes: int

    def __repr__(self) -> str:
        at = ", ".join(f"{name} = {size}" for name, size in self.sizes.items())
        how = {
            "largest sizes": "the largest sizes bound",
            "every size": "each judged of",
            "parts": "bounds of parts hold for",
        }[self.proof]
        return f"RangePeak({self.peak_bytes} bytes at {at}; {how} {self.n_sizes} sizes)"


def resized_schedule(schedule: Schedule, graph: TrainingGraph) -> Schedule:
    """`schedule` at other sizes of the same step; `ScheduleError` if ops differ, or for levers."""
    check_are_graph_and_schedule(graph, schedule)
    if graph.hash in (schedule.graph_hash, schedule.captured_hash):
        return schedule
    if schedule.levers:
        raise ScheduleError(
            f"plan each size, or leave out {schedule.levers[0].lever}: this plan uses it, and it "
            "changes the ops of one size"
        )
    captured_hash = schedule.captured_hash
    if schedule.chunks and not _are_alike(schedule, graph):  # else `graph` is the one in chunks
        captured_hash, graph = graph.hash, in_chunks(graph, schedule.chunks)
    if not _are_alike(schedule, graph):
        mine, theirs = map(_without_shapes, (schedule, graph))
        pairs = zip(mine, theirs, strict=False)
        first = next((f"'{a}', is '{b}'" for a, b in pairs if a != b), "other in number")
        raise ScheduleError(
            "solve on graph.at(...) of the range that it is to run at: this plan was made for "
            f"other ops, first {first}"
        )
    return msgspec.structs.replace(
        schedule, graph_hash=graph.hash, inputs=graph.inputs, signatures=graph.signatures,
        captured_hash=captured_hash,
    )  # fmt: skip


def _are_alike(schedule: Schedule, graph: TrainingGraph) -> bool:
    return _without_shapes(schedule) == _without_shapes(graph)


def _without_shapes(one: Schedule | TrainingGraph) -> list[str]:
    return [_SHAPE.sub("[]", line) for line in one.signatures]  # only they differ between sizes


def simulate_resized(graph: TrainingGraph, schedule: Schedule) -> Simulation:
    return simulate(graph, resized_schedule(schedule, graph))


def peak_over(
    graph: RangedGraph, schedule: Schedule, symbols: tuple[Symbol, ...] | None = None
) -> RangePeak:
    """The most bytes that `schedule` needs at any size of a range, proved."""
    if not isinstance(graph, RangedGraph):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(
            "pass what remat.capture(..., dynamic=...) returned: a peak over a range needs a "
            f"graph over a range, and this is {type(graph).__name__}"
        )
    symbols = symbols or graph.symbols
    number = number_of_points(symbols)
    if graph.rising:  # no value takes more at a smaller size
        top = corner(symbols, "high")
        return RangePeak(_peak_bytes(graph, schedule, top), top, "largest sizes", number)
    if number > _MOST_SIMULATED:
        return _by_parts(graph, schedule, symbols)
    found = ((_peak_bytes(graph, schedule, sizes), sizes) for sizes in points(symbols))
    peak_bytes, sizes = max(found, key=lambda one: one[0])
    return RangePeak(peak_bytes, sizes, "every size", number)


def _by_parts(graph: RangedGraph, schedule: Schedule, symbols: tuple[Symbol, ...]) -> RangePeak:
    number = number_of_points(symbols)
    best, best_sizes = 0, corner(symbols, "high")
    # The number breaks ties: tuples of symbols cannot be compared.
    heap = [(-_bound_bytes(graph, schedule, symbols), 0, symbols)]
    for n in range(1, _MOST_SIMULATED):
        bound, _, part = heapq.heappop(heap)
        top = corner(part, "high")
        # A peak at real sizes is a lower limit of the answer, the bound of a part an upper one.
        if (peak_bytes := _peak_bytes(graph, schedule, top)) > best:
            best, best_sizes = peak_bytes, top
        if -bound <= best:  # all other parts have lower bounds
            return RangePeak(best, best_sizes, "parts", number)
        for i, half in enumerate(_halves(part)):
            heapq.heappush(heap, (-_bound_bytes(graph, schedule, half), 2 * n + i, half))
    falls = next(iter(graph.not_rising()))
    raise ScheduleError(
        f"capture at most {_MOST_SIMULATED} sizes, or multiples: (name, least, largest, "
        f"multiple). The bytes of {falls} may fall where a size grows, so the largest sizes do "
        f"not bound the range, and {_MOST_SIMULATED} parts of its {number} sizes do not settle it"
    )


def _bound_bytes(graph: RangedGraph, schedule: Schedule, part: tuple[Symbol, ...]) -> int:
    return simulate_resized(graph.bounding(part), schedule).peak_bytes


def _halves(part: tuple[Symbol, ...]) -> list[tuple[Symbol, ...]]:
    widest = max(part, key=lambda symbol: len(symbol.sizes))
    sizes = widest.sizes
    middle = len(sizes) // 2
    ends = [(widest.low, sizes[middle - 1]), (sizes[middle], widest.high)]
    return [
        tuple(Symbol(s.name, *end, s.multiple) if s is widest else s for s in part) for end in ends
    ]


def _peak_bytes(graph: RangedGraph, schedule: Schedule, sizes: dict[str, int]) -> int:
    return simulate_resized(graph.at(**sizes), schedule).peak_bytes


class FastPeak:
    """The peak of `schedule` for other bytes of values; `simulate` decides on what it finds."""

    def __init__(self, graph: TrainingGraph, schedule: Schedule) -> None:
        # What is live at a step does not depend on sizes, so steps are read once.
        self.index = {value.name: i for i, value in enumerate(graph.values)}
        self.op_of_step = np.full(len(schedule.steps), -1, dtype=np.int64)
        # While a step runs: what it makes. From the next one on: what came or went.
        made, changed = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
        live: set[str] = set()
        for i, step in enumerate(schedule.steps):
            if isinstance(step, Compute):
                self.op_of_step[i] = graph.op_index[step.op]
            came = arriving_values(graph, step)  # a copy takes its memory as soon as it begins
            made += [(i, self.index[name], 1) for name in came]
            changed += [(i + 1, self.index[name], 1) for name in came if name not in live]
            live.update(came)
            if gone := freed_value(step):
                changed.append((i + 1, self.index[gone], -1))
                live.discard(gone)
        columns = (np.array(found, np.int64).reshape(-1, 3).T for found in (made, changed))
        self.made, self.changed = columns

    def peak_bytes(self, size: PartBytes) -> int:
        n_steps = len(self.op_of_step)
        change = _sums(self.changed, size.values, n_steps + 1)
        running = np.cumsum(change)[:n_steps] + _sums(self.made, size.values, n_steps)
        is_op = self.op_of_step >= 0
        running[is_op] += size.workspaces[self.op_of_step[is_op]]
        return size.resident_bytes + int(running.max(initial=0))


def _sums(entries: Ints, sizes: Ints, n_steps: int) -> Ints:
    found = np.zeros(n_steps, dtype=np.int64)
    steps, values, signs = entries
    # Unlike `found[steps] +=`, this adds up several values of one step.
    np.add.at(found, steps, signs * sizes[values])
    return found
