"""From a state whose hosted ops arrive again to schedules with their copies placed.

A state is repaired and filled as if copies took no time, and its copies are placed. Where that
stalls, another order of copies down may do. Where it does not, bytes in flight had no room: the
state is repaired once more, for the budget less what a schedule without stalls has in flight, stage
by stage, and placed again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from remat.graph_capture.links import Links
from remat.solver.local_search.repair import Repair, fill
from remat.solver.offload.arrivals import base_of, in_flight_by_stage
from remat.solver.offload.copy_order import in_better_order
from remat.solver.offload.placing import in_flight_bytes, place_copies
from remat.solver.offload.trips import order_of_making
from remat.solver.search import Search
from remat.solver.state import Bytes, State


class Weighing(NamedTuple):
    """How a repair weighs drops.

    Attributes
    ----------
    power : of the overload that a drop removes. price : of a copy back, in parts of its time on the
        link: all of it on a link that is full, hardly any on one that has time to spare.
    """

    power: float
    price: float


WEIGHINGS = (Weighing(1.0, 1.0), Weighing(1.0, 0.1), Weighing(0.5, 1.0))
"""Tried in turn; on large graphs the first alone."""

MOST_WAITS = 0.01
"""Of a step, in waits, up to which another order is looked for: longer ones are for a full link."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """What a state has below the device: ops whose outputs arrive again, and values on NVMe."""

    ops: frozenset[int]
    spilled: frozenset[str] = frozenset()


def offer_state(
    search: Search, start: State, hosted: Hosted, links: Links, power: float = 1.0
) -> bool:
    """Offer what `start`, of a problem of `hosting`, comes to; return whether it was repaired."""
    state = start.copy()
    if not Repair(state, search.budget_bytes, power, search).run():
        return False
    fill(state, search.budget_bytes, search)
    if _is_stalled(search, state, hosted, links):
        flight = flight_of(state, hosted.ops, links)
        if repair_beside(search, state, flight, power):
            _is_stalled(search, state, hosted, links)
    return True


def flight_of(state: State, hosted: Collection[int], links: Links) -> Bytes:
    """The most bytes in flight in each stage, in a schedule of `state` without stalls."""
    graph = state.problem.graph
    base = base_of(state, hosted)
    return in_flight_by_stage(graph, base, in_flight_bytes(graph, base, links))


def repair_beside(search: Search, state: State, flight: Bytes, power: float) -> bool:
    """Repair `state` under the budget less `flight`; return whether that was reached."""
    state.entry_bytes += flight
    try:
        return Repair(state, search.budget_bytes, power, search).run()
    finally:
        state.entry_bytes -= flight


def _is_stalled(search: Search, state: State, hosted: Hosted, links: Links) -> bool:
    """Place the copies of `state`, offer that, and return whether the device waits for copies."""
    base = base_of(state, hosted.ops)
    place = partial(
        place_copies, search.graph, base, search.budget_bytes, links, spilled=hosted.spilled
    )
    placed = place()
    if placed is None:
        return False
    waits_us = placed.found.stall_us
    is_better = placed.found.time_us - waits_us < search.best_key[0]
    if is_better and waits_us <= MOST_WAITS * placed.found.time_us:
        placed = in_better_order(
            search, placed, order_of_making(base), lambda order: place(order=order)
        )
    search.offer_judged(placed.schedule, placed.found)
    return bool(placed.found.stalls)
