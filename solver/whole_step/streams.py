"""When copies of a whole step begin and end: one queue each way, and no byte above the budget.

The second of three steps from a `Setting` to a schedule. What goes down begins as soon as it may,
in that order; its bytes leave the device at the end of the copy, or when the room is needed. What
comes up begins at the latest moment from which nothing waits, counted back from the last need, or
where room begins. The clock is that of the judge for the schedule before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remat.graph_capture.links import Links
from remat.solver.whole_step.residence import Residence
from remat.solver.whole_step.setting import Setting

Clock = npt.NDArray[np.float64]
"""The device's time before each event, and after the last."""


@dataclass(frozen=True)
class Streams:
    """Where copies begin and end, as indices of events; one past the last is the end of the step.

    Attributes
    ----------
    begins : of each arrival, the event before which its copy is issued.
    ends : of each departure, the event before which its bytes on the device are free.
    """

    begins: dict[int, int]
    ends: dict[int, int]


def first_clock(residence: Residence) -> Clock:
    """The device's time if it never waits."""
    costs = [
        residence.ops[item.name].cost_us if item.kind == "run" else 0.0 for item in residence.items
    ]
    return np.concatenate(([0.0], np.cumsum(costs)))


def streams(
    residence: Residence, setting: Setting, links: Links, clock: Clock, budget_bytes: int
) -> Streams:
    """Both queues for a clock."""
    room = budget_bytes - residence.live_bytes
    ends = _departures(residence, links, clock, room)
    return Streams(_begins_of_arrivals(residence, setting, links, clock, room, ends), ends)


def _departures(
    residence: Residence, links: Links, clock: Clock, room: npt.NDArray[np.int64]
) -> dict[int, int]:
    """Ends of departures: each stays while it is copied and there is room."""
    items, made = residence.items, _made_at(residence)
    leaves = [(made.get(item.name, k), k) for k, item in enumerate(items) if item.kind == "leave"]
    whole_us, arrivals, ends = 0.0, _arrivals_of(residence), dict[int, int]()
    for issued, k in sorted(leaves):
        whole_us = max(whole_us, clock[min(issued + 1, k)])
        whole_us += links.d2h.us(residence.sizes[items[k].name])
        ends[k] = int(np.searchsorted(clock[:-1], whole_us - 1e-9))
    for k in sorted(ends):
        name = items[k].name
        back = next((at for at in arrivals.get(name, ()) if at > k), len(items))
        end = min(max(ends[k], k), back)
        short = np.flatnonzero(room[k:end] < residence.sizes[name])
        ends[k] = k + int(short[0]) if short.size else end
        room[k : ends[k]] -= residence.sizes[name]
    return ends


def _made_at(residence: Residence) -> dict[str, int]:
    """The event that makes each value of a layer that leaves: its copy begins there."""
    return {
        name: k
        for k, item in enumerate(residence.items)
        if item.kind == "run"
        for name in residence.ops[item.name].outputs
        if name in residence.hosted
    }


def _arrivals_of(residence: Residence) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for k, item in enumerate(residence.items):
        if item.kind == "arrive":
            found.setdefault(item.name, []).append(k)
    return found


def _begins_of_arrivals(
    residence: Residence, setting: Setting, links: Links, clock: Clock,
    room: npt.NDArray[np.int64], ends: dict[int, int],
) -> dict[int, int]:  # fmt: skip
    """Begins of arrivals, in the order of their needs."""
    items = residence.items
    arrivals = [k for k, item in enumerate(items) if item.kind == "arrive"]
    if not setting.prefetch:
        return {k: k for k in arrivals}
    latest, following = dict[int, float](), float("inf")
    for k in reversed(arrivals):
        following = min(clock[k], following) - links.h2d.us(residence.sizes[items[k].name])
        latest[k] = following
    may = _earliest(residence, setting, ends)
    begins, last = dict[int, int](), 0
    for k in arrivals:
        size_bytes = residence.sizes[items[k].name]
        at = int(np.searchsorted(clock[:-1], latest[k] + 1e-9, side="right")) - 1
        at = min(max(at, last, may[k]), k)
        short = np.flatnonzero(room[at:k] < size_bytes)
        at += int(short[-1]) + 1 if short.size else 0
        room[at:k] -= size_bytes
        begins[k] = last = at
    return begins


def _earliest(residence: Residence, setting: Setting, ends: dict[int, int]) -> dict[int, int]:
    """The first event before which each arrival may be issued.

    What was there before must be gone; with a window, so must all but the last parameters. States
    that are on NVMe go through slots on the host.
    """
    gone, dropped, may, fetched = dict[str, int](), list[int](), dict[int, int](), 0
    read, written = 0, list[int]()
    for k, item in enumerate(residence.items):
        is_weight = item.name.startswith("W.")
        is_read = item.kind in ("arrive", "leave") and setting.state_is_on_nvme(item.name)
        if item.kind == "drop":
            gone[item.name] = k + 1
            dropped += [k + 1] if is_weight else []
        elif item.kind == "leave":
            gone[item.name] = max(ends[k], k + 1)
            written += [k + 1] if is_read else []
        elif item.kind == "arrive":
            may[k] = gone.get(item.name, 0)
            if is_read:  # it is read from NVMe once a state before it has made room on the host
                may[k] = written[read - setting.slots] if read >= setting.slots else 0
                read += 1
            if is_weight:
                before = fetched - setting.window
                if setting.window and 0 <= before < len(dropped):
                    may[k] = max(may[k], dropped[before])
                fetched += 1
    return may
