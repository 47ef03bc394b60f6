"""Where copies begin and end: a constructive scheduler over the links.

Takes a base (`arrivals.Base`), in which copies take no time and whose peak is within the budget.
Then

1. offloads begin as soon as their value is made, in that order: on one link, no other order ends
   any first part of the copies earlier. `copy_order` tries others;
2. fetches begin as late as they can without a stall, in the order of need, from the last one
   backwards: start = min(need, start of the next one) - duration;
3. between its last use and the end of its copy a value stays where there is room, else the device
   waits for the copy. A fetch begins at its latest start if there is room from there to its use,
   else where room begins, and its use waits. A value for which there is room all the way stays.

With 1 and 2 the bytes in flight are the least possible at every moment for these orders of copies.
The budget is never exceeded, since a peak goes by the order of the steps alone. A stall moves all
that comes after it, so some rounds follow, each timed by the judge's clock of the one before.

Cost: O(n log n + copies · n) a round, for n steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.links import Links, Tier
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.schedules.simulate import simulate
from remat.schedules.simulation import Simulation
from remat.solver.offload.arrivals import Base, Bytes
from remat.solver.offload.spilling import reads, writes
from remat.solver.offload.trips import Round, Times, Trip

ROUNDS = 3
"""How often copies are placed anew; more rounds hardly ever shorten a step."""
BOUNDLESS = 1 << 60
"""Room in bytes that no step fills."""


class Placed(NamedTuple):
    """A schedule with its copies placed, and what the judge found."""

    schedule: Schedule
    found: Simulation


def place_copies(
    graph: TrainingGraph,
    base: Base,
    budget_bytes: int,
    links: Links,
    *,
    rounds: int = ROUNDS,
    slack_us: float = 0.0,
    spilled: Collection[str] = (),
    order: tuple[str, ...] = (),
) -> Placed | None:
    """The fastest of some rounds of placing the copies of `base`.

    None where the base is over the budget, or the host or NVMe has no room for what goes there, or
    a value must leave before its turn in `order`.

    Parameters
    ----------
    links : what times the copies; the room below the device is theirs as well.
    slack_us : by how much fetches begin before their latest start.
    spilled : values that go on from the host to NVMe.
    order : of copies down, with every value that is ever absent; by default that of their making.

    Raises
    ------
    SolverError : a value is to wait on NVMe, and there is no link to one.
    """
    if base.peak_bytes > budget_bytes:
        return None
    best: Placed | None = None
    clock_us = clock_of_base(graph, base)
    size = _sizes(graph, base)
    for _ in range(rounds):
        one = Round(base, links, size, clock_us, budget_bytes - base.live_bytes, order)
        trips = one.trips(slack_us)
        if any(trip.leaves <= one.down[trip.absence.value] for trip in trips):
            return best
        steps = _steps(one, trips, frozenset(spilled))
        if not _fits_below(steps, size, links):
            return best
        schedule = Schedule.for_graph(graph, steps, budget_bytes=budget_bytes)
        found = simulate(graph, schedule, links)
        if best is None or found.time_us < best.found.time_us:
            best = Placed(schedule, found)
        if not found.stalls:
            break
        clock_us = _clock_of_judge(base, steps, found)
    return best


def in_flight_bytes(graph: TrainingGraph, base: Base, links: Links) -> Bytes:
    """Bytes in flight while each item of `base` runs, were there room for all.

    A schedule without stalls wants them beside those of the base.
    """
    room_bytes = np.full(len(base.items), BOUNDLESS, np.int64)
    Round(base, links, _sizes(graph, base), clock_of_base(graph, base), room_bytes).trips()
    return BOUNDLESS - room_bytes


def clock_of_base(graph: TrainingGraph, base: Base) -> Times:
    """The device's clock before each item, and at the end, if nothing waits."""
    cost = {op.name: op.cost_us for op in graph.ops}
    took = [cost[name] if kind == "compute" else 0.0 for kind, name in base.items]
    return np.concatenate(([0.0], np.cumsum(took)))


def _sizes(graph: TrainingGraph, base: Base) -> dict[str, int]:
    return {name: graph.value_by_name[name].size_bytes for name in base.made}


def _steps(one: Round, trips: Sequence[Trip], spilled: frozenset[str]) -> list[Step]:
    """The steps. Offloads stand right after the op that makes their value, or one before it.

    Before an item stand the frees of what leaves there, then copies up.
    """
    before = _before(one, trips, spilled)
    away = {trip.absence.value for trip in trips}
    offloads: dict[int, list[Step]] = {}
    for name, k in one.down.items():
        if name in away:
            down = (Offload(name), *(writes(name) if name in spilled else ()))
            offloads.setdefault(k, []).extend(down)
    steps: list[Step] = []
    for k, (kind, name) in enumerate(one.base.items):
        steps += before.get(k, ())
        if kind == "compute":
            steps += (Compute(name), *offloads.get(k, ()))
        elif kind == "free":
            steps.append(Free(name))
    return steps


def _before(one: Round, trips: Sequence[Trip], spilled: frozenset[str]) -> dict[int, list[Step]]:
    before: dict[int, list[Step]] = {}
    for trip in trips:
        before.setdefault(trip.leaves, []).append(Free(trip.absence.value))
    for k, steps in reads(one, trips, spilled).items():
        before.setdefault(k, []).extend(steps)
    last = {trip.absence.value: trip for trip in trips}
    for trip in trips:
        name = trip.absence.value
        before.setdefault(trip.fetched, []).append(Fetch(name))
        if last[name] is trip:  # the lower copy serves all returns
            before[trip.fetched].append(Free(name, "host"))
    return before


def _fits_below(steps: Sequence[Step], size: dict[str, int], links: Links) -> bool:
    """Whether host and NVMe have room for what the steps put there."""
    now: Counter[Tier] = Counter()
    for tier, size_bytes in _moves_below(steps, size):
        now[tier] += size_bytes
        if now[tier] > links.room_bytes(tier):
            return False
    return True


def _moves_below(steps: Sequence[Step], size: dict[str, int]) -> Iterator[tuple[Tier, int]]:
    for step in steps:
        if isinstance(step, Offload | Fetch) and step.to != "device":
            yield step.to, size[step.value]
        elif isinstance(step, Free) and step.at != "device":
            yield step.at, -size[step.value]


def _clock_of_judge(base: Base, steps: Sequence[Step], found: Simulation) -> Times:
    """The device's clock before each item, and at the end, waits included."""
    pairs = zip(steps, found.clock_us, strict=True)
    ends = iter([us for step, us in pairs if isinstance(step, Compute)])
    clock_us, now_us = [0.0], 0.0
    for kind, _ in base.items:
        now_us = next(ends) if kind == "compute" else now_us
        clock_us.append(now_us)
    return np.array(clock_us)
