"""Where copies begin and end: a constructive scheduler over the links.

Takes an `UntimedSchedule`, whose copies take no time and whose peak is within the budget.

1. Offloads begin as soon as their value is made, in that order: on one link, no other order ends
   any first part of the copies earlier. `with_copies` tries others.
2. Fetches begin as late as they can without a stall, in the order of need, from the last one back.
3. A value stays to the end of its copy down where there is room, else the device waits. A fetch
   begins where there is room from there to its use. A value with room all the way stays.

Bytes in flight then are the least for these orders. A peak goes by the order of steps alone, so the
budget holds. A stall moves all after it, so some rounds follow, timed by the simulator's clock.
Cost: O(n log n + copies · n) a round, for n steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from remat.graph_capture.errors import SolverError, option
from remat.graph_capture.graph import Link, Links, Tier, TrainingGraph
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.schedules.simulate import Simulation, simulate
from remat.solver.offload.fetch_as_recompute import OffDeviceSpan, UntimedSchedule
from remat.solver.state import Bytes

_Times = npt.NDArray[np.float64]
_SOON_US = 1e-6  # closer times are one: sums of costs are rounded


class _Transfer(NamedTuple):
    off_span: OffDeviceSpan
    leaves: int  # the item before which the value is freed
    fetched: int  # the item before which its fetch stands
    start_us: float  # of the copy back, at the latest if its use is not to wait


@dataclass(frozen=True)
class _PlacingRound:
    base: UntimedSchedule
    links: Links
    size: dict[str, int]
    clock_us: _Times  # the device's clock before each item, and at the end
    room_bytes: Bytes  # free while each item runs; it shrinks by what is in flight
    order: tuple[str, ...] = ()  # of values that go down; by default that of their making

    @cached_property
    def down(self) -> dict[str, int]:
        """By value, in `order`, the item after which its copy down stands."""
        order = self.order or order_of_making(self.base)
        # A copy stands no earlier than those before it.
        stands = accumulate((self.base.made[name] for name in order), max)
        return dict(zip(order, stands, strict=True))

    def transfers(self) -> list[_Transfer]:
        """Spans that are left, by return; a value with room all the way stays."""
        leaving = self._leaving()
        away = sorted(leaving, key=lambda off_span: off_span.returns)
        needs = ((float(self.clock_us[a.returns]), self.size[a.value]) for a in away)
        starts = latest_starts(list(needs), self.links.h2d)
        transfers: list[_Transfer] = []
        first = 0
        for off_span, start_us in zip(away, starts, strict=True):
            first = max(item_before(self.clock_us, start_us), first, leaving[off_span])
            began = min(first, off_span.returns)
            first = taken_from(self.room_bytes, began, off_span.returns, self.size[off_span.value])
            transfers.append(_Transfer(off_span, leaving[off_span], first, start_us))
        return transfers

    def arrived_us(self) -> dict[str, float]:
        """When the copy of each value to the host ends, in the order in which they begin."""
        ready = ((float(self.clock_us[k + 1]), self.size[name]) for name, k in self.down.items())
        return dict(zip(self.down, earliest_ends(ready, self.links.d2h), strict=True))

    def _leaving(self) -> dict[OffDeviceSpan, int]:
        whole_us = self.arrived_us()
        leaving, copied = dict[OffDeviceSpan, int](), set[str]()
        for off_span in self.base.off_spans:
            value, first = off_span.value, off_span.leaves + 1
            # What is below already may go at once.
            end = first if value in copied else max(item_at(self.clock_us, whole_us[value]), first)
            end = kept_to(self.room_bytes, first, min(end, off_span.returns), self.size[value])
            if end < off_span.returns:
                copied.add(value)
                leaving[off_span] = end
        return leaving


def order_of_making(base: UntimedSchedule) -> tuple[str, ...]:
    """Every value that is ever absent, in the order in which they are made."""
    return tuple(sorted(base.made, key=lambda name: base.made[name]))


def earliest_ends(copies: Iterable[tuple[float, int]], link: Link) -> list[float]:
    """When each of `copies` over one link ends, in turn; each has a time it is ready, and bytes."""
    ends, free_us = list[float](), 0.0
    for ready_us, size_bytes in copies:
        free_us = max(free_us, ready_us) + link.us(size_bytes)
        ends.append(free_us)
    return ends


def latest_starts(copies: Sequence[tuple[float, int]], link: Link) -> list[float]:
    """When each of `copies` over one link must begin, in turn: each is due at a time."""
    starts, following_us = list[float](), float("inf")
    for due_us, size_bytes in reversed(copies):
        following_us = min(due_us, following_us) - link.us(size_bytes)
        starts.append(following_us)
    return starts[::-1]


def kept_to(room_bytes: Bytes, first: int, end: int, size_bytes: int) -> int:
    """Keep so many bytes from item `first` on, at most to `end`; how far there is room."""
    short = np.flatnonzero(room_bytes[first:end] < size_bytes)
    end = first + int(short[0]) if short.size else end
    room_bytes[first:end] -= size_bytes
    return end


def taken_from(room_bytes: Bytes, first: int, end: int, size_bytes: int) -> int:
    """Take so many bytes up to item `end`, from `first` on or from where there is room."""
    short = np.flatnonzero(room_bytes[first:end] < size_bytes)
    first += int(short[-1]) + 1 if short.size else 0
    room_bytes[first:end] -= size_bytes
    return first


def item_at(clock_us: _Times, time_us: float) -> int:
    """The first item that the device reaches at that time or later."""
    return int(np.searchsorted(clock_us[:-1], time_us - _SOON_US))


def item_before(clock_us: _Times, time_us: float) -> int:
    """The last item that the device reaches by then."""
    # A copy waits for what the device was given before it, so it stands before the last such item.
    return int(np.searchsorted(clock_us[:-1], time_us + _SOON_US, side="right")) - 1


# Values on NVMe go down after the host, in order of making, and are read where the host has room.


def _reads(
    one: _PlacingRound, transfers: Sequence[_Transfer], spilled: Collection[str]
) -> dict[int, list[Step]]:
    """Reads from NVMe, by the item before which they stand."""
    first: dict[str, _Transfer] = {}
    for transfer in transfers:
        if transfer.off_span.value in spilled:
            # One read does: later fetches find it on the host.
            first.setdefault(transfer.off_span.value, transfer)
    if not first:
        return {}
    if (write := one.links.write) is None or (read := one.links.read) is None:
        raise SolverError(
            f"capture with {option('nvme')}, or let values wait on the host: no link to NVMe"
        )
    whole = _written(one, first, write)
    room_bytes = _host_room(one, transfers, spilled)
    needs = [(transfer.start_us, one.size[name]) for name, transfer in first.items()]
    steps: dict[int, list[Step]] = {}
    for (name, transfer), start_us in zip(first.items(), latest_starts(needs, read), strict=True):
        began = min(max(item_before(one.clock_us, start_us), whole[name]), transfer.fetched)
        began = taken_from(room_bytes, began, transfer.fetched, one.size[name])
        steps.setdefault(began, []).extend((Fetch(name, "host"), Free(name, "nvme")))
    return steps


def _written(one: _PlacingRound, first: Collection[str], write: Link) -> dict[str, int]:
    """The first item at which each value is whole on NVMe, and after the one that makes it."""
    arrived = [(name, us) for name, us in one.arrived_us().items() if name in first]
    ends = earliest_ends([(us, one.size[name]) for name, us in arrived], write)
    return {
        name: max(item_at(one.clock_us, end_us), one.down[name] + 1)
        for (name, _), end_us in zip(arrived, ends, strict=True)
    }


def _host_room(
    one: _PlacingRound, transfers: Sequence[_Transfer], spilled: Collection[str]
) -> Bytes:
    """Free on the host while each item runs, beside values that wait there throughout."""
    room_bytes = np.full(len(one.base.items), one.links.host_bytes, np.int64)
    last = {transfer.off_span.value: transfer.fetched for transfer in transfers}
    first = {transfer.off_span.value: transfer.fetched for transfer in reversed(transfers)}
    for name, end in last.items():
        begin = first[name] if name in spilled else one.base.made[name]
        room_bytes[begin : end + 1] -= one.size[name]
    return room_bytes


_ROUNDS = 3  # more hardly ever shorten a step
_BOUNDLESS = 1 << 60  # room in bytes that no step fills


class PlacedSchedule(NamedTuple):
    schedule: Schedule
    found: Simulation


def place_copies(
    graph: TrainingGraph,
    base: UntimedSchedule,
    budget_bytes: int,
    links: Links,
    *,
    spilled: Collection[str] = (),  # values that go on from the host to NVMe
    order: tuple[str, ...] = (),  # of copies down, with every value that is ever absent
) -> PlacedSchedule | None:
    """The fastest of some rounds; None over the budget, without room, or out of `order`."""
    if base.peak_bytes > budget_bytes:
        return None
    best: PlacedSchedule | None = None
    clock_us, size = untimed_clock(graph, base), _sizes(graph, base)
    for _ in range(_ROUNDS):  # each round is timed by the clock of the one before
        one = _PlacingRound(base, links, size, clock_us, budget_bytes - base.live_bytes, order)
        transfers = one.transfers()
        if any(transfer.leaves <= one.down[transfer.off_span.value] for transfer in transfers):
            return best
        steps = _steps(one, transfers, frozenset(spilled))
        if not _fits_below(steps, size, links):
            return best
        schedule = Schedule.for_graph(graph, steps, budget_bytes=budget_bytes)
        found = simulate(graph, schedule, links)
        if best is None or found.time_us < best.found.time_us:
            best = PlacedSchedule(schedule, found)
        if not found.stalls:
            break
        clock_us = _simulated_clock(base, steps, found)
    return best


def in_flight_bytes(graph: TrainingGraph, base: UntimedSchedule, links: Links) -> Bytes:
    """While each item runs, were there room for all: what no stalls would take."""
    room_bytes = np.full(len(base.items), _BOUNDLESS, np.int64)  # what goes missing is in flight
    clock_us, size = untimed_clock(graph, base), _sizes(graph, base)
    _PlacingRound(base, links, size, clock_us, room_bytes).transfers()
    return _BOUNDLESS - room_bytes


def untimed_clock(graph: TrainingGraph, base: UntimedSchedule) -> _Times:
    """The device's clock before each item, and at the end, if nothing waits."""
    cost = {op.name: op.cost_us for op in graph.ops}
    took = [cost[name] if kind == "compute" else 0.0 for kind, name in base.items]
    return np.concatenate(([0.0], np.cumsum(took)))


def _sizes(graph: TrainingGraph, base: UntimedSchedule) -> dict[str, int]:
    return {name: graph.value_by_name[name].size_bytes for name in base.made}


def _steps(
    one: _PlacingRound, transfers: Sequence[_Transfer], spilled: frozenset[str]
) -> list[Step]:
    """Before an item stand the frees of what leaves there, then copies up."""
    before = _before(one, transfers, spilled)
    away = {transfer.off_span.value for transfer in transfers}
    offloads: dict[int, list[Step]] = {}
    for name, k in one.down.items():
        if name in away:
            offloads.setdefault(k, []).append(Offload(name))
            if name in spilled:
                offloads[k] += (Offload(name, "nvme"), Free(name, "host"))
    steps: list[Step] = []
    for k, (kind, name) in enumerate(one.base.items):
        steps += before.get(k, ())
        if kind == "compute":
            steps += (Compute(name), *offloads.get(k, ()))
        elif kind == "free":
            steps.append(Free(name))
    return steps


def _before(
    one: _PlacingRound, transfers: Sequence[_Transfer], spilled: frozenset[str]
) -> dict[int, list[Step]]:
    before: dict[int, list[Step]] = {}
    for transfer in transfers:
        before.setdefault(transfer.leaves, []).append(Free(transfer.off_span.value))
    for k, steps in _reads(one, transfers, spilled).items():
        before.setdefault(k, []).extend(steps)
    last = {transfer.off_span.value: transfer for transfer in transfers}
    for transfer in transfers:
        name = transfer.off_span.value
        before.setdefault(transfer.fetched, []).append(Fetch(name))
        if last[name] is transfer:  # the lower copy serves all returns
            before[transfer.fetched].append(Free(name, "host"))
    return before


def _fits_below(steps: Sequence[Step], size: dict[str, int], links: Links) -> bool:
    now: Counter[Tier] = Counter()
    for step in steps:
        if isinstance(step, Offload | Fetch) and step.to != "device":
            now[step.to] += size[step.value]
            if now[step.to] > links.room_bytes(step.to):
                return False
        elif isinstance(step, Free) and step.at != "device":
            now[step.at] -= size[step.value]
    return True


def _simulated_clock(base: UntimedSchedule, steps: Sequence[Step], found: Simulation) -> _Times:
    """The device's clock before each item, and at the end, waits included."""
    pairs = zip(steps, found.clock_us, strict=True)
    ends = iter([us for step, us in pairs if isinstance(step, Compute)])
    clock_us, now_us = [0.0], 0.0
    for kind, _ in base.items:
        now_us = next(ends) if kind == "compute" else now_us
        clock_us.append(now_us)
    return np.array(clock_us)
