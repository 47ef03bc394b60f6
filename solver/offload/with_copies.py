"""From a state whose hosted ops arrive again to schedules with their copies placed.

A state is repaired as if copies took no time, and its copies are placed. Where that stalls, another
order of copies down may do. Else bytes in flight had no room: the state is repaired once more for
the budget less those, stage by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from remat.graph_capture.graph import Links
from remat.schedules.schedule import Free
from remat.schedules.simulate import Copy
from remat.solver.local_search.repair import Repair, fill
from remat.solver.offload.copy_placing import (
    PlacedSchedule,
    in_flight_bytes,
    order_of_making,
    place_copies,
)
from remat.solver.offload.fetch_as_recompute import most_by_stage, untimed_schedule
from remat.solver.search import Search
from remat.solver.state import Bytes, State
from remat.solver.stopping import REORDERED

# Better orders of copies down: in the order of making, a value that could wait goes before one that
# must leave. Least lateness with release times is hard already (Lenstra, Rinnooy Kan, Brucker 1977,
# https://doi.org/10.1016/S0167-5060(08)70743-X). So where a value is waited for, it goes before
# others copied meanwhile, or one after it; the first faster one is taken.

_Order = tuple[str, ...]


def in_better_order(
    search: Search,
    placed: PlacedSchedule,
    order: _Order,
    place: Callable[[_Order], PlacedSchedule | None],
) -> PlacedSchedule:
    """The fastest placement in other orders, of which `place` gives None for impossible ones."""
    left = REORDERED.at(search.problem.n_ops)
    others = _others(placed, order)
    while left > 0 and not search.out_of_time():
        if (other := next(others, None)) is None:
            break
        left -= 1
        found = place(other)
        if found is not None and found.found.time_us < placed.found.time_us:
            placed, order = found, other
            others = _others(placed, order)
    return placed


def _others(placed: PlacedSchedule, order: _Order) -> Iterator[_Order]:
    """Orders in which a value that is waited for goes down earlier; the longest wait first."""
    down = {copy.value: copy for copy in placed.found.copies if copy.link == "d2h"}
    for name in _waited_for(placed, down):
        issued_us = placed.found.clock_us[down[name].step]
        i = order.index(name)
        for j in reversed(range(i)):
            if (before := down.get(order[j])) is None:
                continue
            yield (*order[:j], *order[j + 1 : i + 1], order[j], *order[i + 1 :])
            if before.start_us < issued_us:  # the link is idle until there is `name`
                break
            if j < i - 1:
                yield (*order[:j], name, *order[j:i], *order[i + 1 :])


def _waited_for(placed: PlacedSchedule, down: dict[str, Copy]) -> list[str]:
    """Values the end of whose copy down is waited for: to be freed, or to come back."""
    waits: dict[str, float] = {}
    back = {(copy.value, copy.start_us) for copy in placed.found.copies if copy.link == "h2d"}
    for stall in placed.found.stalls:
        if (copy := down.get(stall.value)) is None:
            continue
        is_freed = isinstance(placed.schedule.steps[stall.step], Free)
        if is_freed or (copy.value, copy.end_us) in back:  # when its copy down ends
            waits[copy.value] = waits.get(copy.value, 0.0) + stall.us
    return sorted(waits, key=lambda name: (-waits[name], name))


class Weighing(NamedTuple):
    power: float  # of the overload that a drop removes
    # Of a copy back, in parts of its time on the link: all if it is full, hardly any if it is not.
    cost_factor: float


WEIGHINGS = (Weighing(1.0, 1.0), Weighing(1.0, 0.1), Weighing(0.5, 1.0))  # if large the first alone

_MOST_WAITS = 0.01  # of a step, up to which another order is looked for: more is a full link


@dataclass(frozen=True, slots=True)
class Hosted:
    """What a state has below the device: ops whose outputs arrive again, and values on NVMe."""

    ops: frozenset[int]
    spilled: frozenset[str] = frozenset()


def offer_state(search: Search, start: State, hosted: Hosted, links: Links, power: float) -> bool:
    """Repair and place `start`, a state of `with_fetches`; returns whether it was repaired."""
    state = start.copy()
    if not Repair(state, search.budget_bytes, power, search).run():
        return False
    fill(state, search.budget_bytes, search)
    if _is_stalled(search, state, hosted, links):
        flight = flight_of(state, hosted.ops, links)
        state.entry_bytes += flight  # bytes in flight count as carried in, stage by stage
        try:
            is_repaired = Repair(state, search.budget_bytes, power, search).run()
        finally:
            state.entry_bytes -= flight
        if is_repaired:
            _is_stalled(search, state, hosted, links)
    return True


def flight_of(state: State, hosted: Collection[int], links: Links) -> Bytes:
    """The most bytes in flight in each stage, in a schedule of `state` without stalls."""
    graph = state.problem.graph
    base = untimed_schedule(state, hosted)
    ran = (name if kind == "compute" else "" for kind, name in base.items)
    return most_by_stage(graph, ran, in_flight_bytes(graph, base, links))


def _is_stalled(search: Search, state: State, hosted: Hosted, links: Links) -> bool:
    """Place the copies and offer that; returns whether the device waits for copies."""
    base = untimed_schedule(state, hosted.ops)
    place = partial(
        place_copies, search.graph, base, search.budget_bytes, links, spilled=hosted.spilled
    )
    if (placed := place()) is None:
        return False
    waits_us = placed.found.stall_us
    is_better = placed.found.time_us - waits_us < search.best_key[0]  # orders shorten waits alone
    if is_better and waits_us <= _MOST_WAITS * placed.found.time_us:
        order = order_of_making(base)
        placed = in_better_order(search, placed, order, lambda other: place(order=other))
    search.offer_evaluated(placed.schedule, placed.found)
    return bool(placed.found.stalls)
