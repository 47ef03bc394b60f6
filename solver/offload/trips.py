"""Where a hosted value leaves the device and where its copy back begins, given a clock.

The rules stand in `placing`; this is one round of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from remat.graph_capture.links import Link, Links
from remat.solver.offload.arrivals import Absence, Base, Bytes

Times = npt.NDArray[np.float64]
SOON_US = 1e-6
"""Times closer than this are one: sums of costs are rounded."""


class Trip(NamedTuple):
    """An absence with its copies placed.

    Attributes
    ----------
    leaves, fetched : the items before which the value is freed, and before which its fetch stands.
    start_us : when the copy back must begin, so that its use does not wait.
    """

    absence: Absence
    leaves: int
    fetched: int
    start_us: float


@dataclass(frozen=True)
class Round:
    """One round of placing.

    Attributes
    ----------
    base : what is placed. links : what times the copies. size : bytes of each value.
    clock_us : the device's clock before each item, and at the end.
    room_bytes : what is free on the device while each item runs; it shrinks by what is in flight.
    order : in which values go down; by default that of their making.
    down : for each value, in that order, the item after which its copy down stands.
    """

    base: Base
    links: Links
    size: dict[str, int]
    clock_us: Times
    room_bytes: Bytes
    order: tuple[str, ...] = ()
    down: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        order = self.order or order_of_making(self.base)
        stands = accumulate((self.base.made[name] for name in order), max)
        object.__setattr__(self, "down", dict(zip(order, stands, strict=True)))

    def trips(self, slack_us: float = 0.0) -> list[Trip]:
        """The absences that are left, in the order of their returns.

        A value for which there is room all the way stays: its absence is none.
        """
        leaving = self._leaving()
        away = sorted(leaving, key=lambda absence: absence.returns)
        needs = ((float(self.clock_us[a.returns]), self.size[a.value]) for a in away)
        starts = latest_starts(list(needs), self.links.h2d)
        trips: list[Trip] = []
        first = 0
        for absence, start_us in zip(away, starts, strict=True):
            first = max(first, leaving[absence])
            first = self._fetched(absence, start_us - slack_us, first)
            trips.append(Trip(absence, leaving[absence], first, start_us))
        return trips

    def arrived_us(self) -> dict[str, float]:
        """When the copy of each value to the host ends, in the order in which they begin."""
        ready = ((float(self.clock_us[k + 1]), self.size[name]) for name, k in self.down.items())
        ends = earliest_ends(ready, self.links.d2h)
        return dict(zip(self.down, ends, strict=True))

    def _leaving(self) -> dict[Absence, int]:
        """The item before which each value is freed."""
        whole_us = self.arrived_us()
        leaving: dict[Absence, int] = {}
        copied: set[str] = set()
        for absence in self.base.absences:
            value, first = absence.value, absence.leaves + 1
            end = first if value in copied else max(item_at(self.clock_us, whole_us[value]), first)
            end = self._kept(first, min(end, absence.returns), self.size[value])
            if end < absence.returns:
                copied.add(value)
                leaving[absence] = end
        return leaving

    def _kept(self, first: int, end: int, size_bytes: int) -> int:
        """Keep so many bytes from item `first` on, at most to `end`; how far there is room."""
        short = np.flatnonzero(self.room_bytes[first:end] < size_bytes)
        end = first + int(short[0]) if short.size else end
        self.room_bytes[first:end] -= size_bytes
        return end

    def _fetched(self, absence: Absence, start_us: float, first: int) -> int:
        """The item before which the fetch stands, from `first` on."""
        began = min(max(item_before(self.clock_us, start_us), first), absence.returns)
        return taken_from(self.room_bytes, began, absence.returns, self.size[absence.value])


def order_of_making(base: Base) -> tuple[str, ...]:
    """Every value that is ever absent, in the order in which they are made."""
    return tuple(sorted(base.made, key=lambda name: base.made[name]))


def earliest_ends(copies: Iterable[tuple[float, int]], link: Link) -> list[float]:
    """When each of `copies` over one link ends, in turn: each is ready at a time, and has bytes."""
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


def taken_from(room_bytes: Bytes, first: int, end: int, size_bytes: int) -> int:
    """Take so many bytes up to item `end`, from `first` on or from where there is room."""
    short = np.flatnonzero(room_bytes[first:end] < size_bytes)
    first += int(short[-1]) + 1 if short.size else 0
    room_bytes[first:end] -= size_bytes
    return first


def item_at(clock_us: Times, time_us: float) -> int:
    """The first item that the device reaches at that time or later."""
    return int(np.searchsorted(clock_us[:-1], time_us - SOON_US))


def item_before(clock_us: Times, time_us: float) -> int:
    """The last item that the device reaches by then.

    A copy begins no earlier than what the device was given before it ends. So one that must begin
    at that time stands before this item.
    """
    return int(np.searchsorted(clock_us[:-1], time_us + SOON_US, side="right")) - 1
