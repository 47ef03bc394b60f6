"""From a state whose hosted ops arrive again to schedules with their copies placed.

A state is repaired and filled as if copies took no time, and its copies are placed. Where that
stalls, bytes in flight had no room: the state is repaired once more, for the budget less what a
schedule without stalls has in flight, stage by stage, and placed again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from remat.graph_capture.links import Links
from remat.solver.local_search.repair import Repair, fill
from remat.solver.offload.arrivals import base_of, in_flight_by_stage
from remat.solver.offload.placing import in_flight_bytes, place
from remat.solver.search import Search
from remat.solver.state import Bytes, State

POWER = 1.0
"""Of the overload that a drop removes, in the score of a repair."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """What a state has below the device: ops whose outputs arrive again, and values on NVMe."""

    ops: frozenset[int]
    spilled: frozenset[str] = frozenset()


def offer_state(search: Search, start: State, hosted: Hosted, links: Links) -> float:
    """Offer what `start`, of a problem of `hosting`, comes to; return the least time found.

    Infinite where no schedule fits.
    """
    state = start.copy()
    if not Repair(state, search.budget_bytes, POWER, search).run():
        return float("inf")
    fill(state, search.budget_bytes, search)
    best_us, is_stalled = _offer_placed(search, state, hosted, links)
    if is_stalled and repair_beside(search, state, flight_of(state, hosted.ops, links)):
        best_us = min(best_us, _offer_placed(search, state, hosted, links)[0])
    return best_us


def flight_of(state: State, hosted: Collection[int], links: Links) -> Bytes:
    """The most bytes in flight in each stage, in a schedule of `state` without stalls."""
    graph = state.problem.graph
    base = base_of(state, hosted)
    return in_flight_by_stage(graph, base, in_flight_bytes(graph, base, links))


def repair_beside(search: Search, state: State, flight: Bytes) -> bool:
    """Repair `state` under the budget less `flight`; return whether that was reached."""
    state.entry_bytes += flight
    try:
        return Repair(state, search.budget_bytes, POWER, search).run()
    finally:
        state.entry_bytes -= flight


def _offer_placed(search: Search, state: State, hosted: Hosted, links: Links) -> tuple[float, bool]:
    """The time of `state` with its copies placed, and whether the device waits for copies."""
    base = base_of(state, hosted.ops)
    placed = place(search.graph, base, search.budget_bytes, links, spilled=hosted.spilled)
    if placed is None:
        return float("inf"), False
    search.offer_judged(placed.schedule, placed.found)
    return placed.found.time_us, bool(placed.found.stalls)
