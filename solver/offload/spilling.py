"""Values that wait on NVMe: they go down right after they reach the host, and come up when due.

They are written in the order in which they are made, and read so that the fetch to the device
need not wait, where the host has room from then on; else from where it has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from remat.graph_capture.errors import SolverError, option
from remat.graph_capture.links import Link, Links
from remat.schedules.schedule import Fetch, Free, Offload, Step
from remat.solver.offload.arrivals import Bytes
from remat.solver.offload.trips import (
    Round,
    Trip,
    earliest_ends,
    item_at,
    item_before,
    latest_starts,
    taken_from,
)


def reads(one: Round, trips: Sequence[Trip], spilled: Collection[str]) -> dict[int, list[Step]]:
    """The reads from NVMe, by the item before which they stand.

    Raises
    ------
    SolverError : a value is to wait on NVMe, and there is no link to one.
    """
    first: dict[str, Trip] = {}
    for trip in trips:
        if trip.absence.value in spilled:
            first.setdefault(trip.absence.value, trip)
    if not first:
        return {}
    write, read = nvme_links(one.links)
    whole = _written(one, first, write)
    room_bytes = _host_room(one, trips, spilled)
    needs = [(trip.start_us, one.size[name]) for name, trip in first.items()]
    steps: dict[int, list[Step]] = {}
    for (name, trip), start_us in zip(first.items(), latest_starts(needs, read), strict=True):
        began = min(max(item_before(one.clock_us, start_us), whole[name]), trip.fetched)
        began = taken_from(room_bytes, began, trip.fetched, one.size[name])
        steps.setdefault(began, []).extend((Fetch(name, "host"), Free(name, "nvme")))
    return steps


def writes(name: str) -> tuple[Step, ...]:
    """What follows the offload to the host of a value that waits on NVMe."""
    return Offload(name, "nvme"), Free(name, "host")


def nvme_links(links: Links) -> tuple[Link, Link]:
    """The ways to NVMe and back.

    Raises
    ------
    SolverError : there are none.
    """
    if links.write is None or links.read is None:
        raise SolverError(
            f"no link to NVMe: capture with {option('nvme')}, or let values wait on the host"
        )
    return links.write, links.read


def _written(one: Round, first: Collection[str], write: Link) -> dict[str, int]:
    """The first item at which each value is whole on NVMe, and after the one that makes it."""
    arrived = [(name, us) for name, us in one.arrived_us().items() if name in first]
    ends = earliest_ends([(us, one.size[name]) for name, us in arrived], write)
    return {
        name: max(item_at(one.clock_us, end_us), one.down[name] + 1)
        for (name, _), end_us in zip(arrived, ends, strict=True)
    }


def _host_room(one: Round, trips: Sequence[Trip], spilled: Collection[str]) -> Bytes:
    """What is free on the host while each item runs, beside values that wait there throughout."""
    room_bytes = np.full(len(one.base.items), one.links.host_bytes, np.int64)
    last = {trip.absence.value: trip.fetched for trip in trips}
    first = {trip.absence.value: trip.fetched for trip in reversed(trips)}
    for name, end in last.items():
        begin = first[name] if name in spilled else one.base.made[name]
        room_bytes[begin : end + 1] -= one.size[name]
    return room_bytes
