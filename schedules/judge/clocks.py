"""When each step of a schedule runs: a clock an engine, each in the order of the steps.

Engines are the device, the host that computes, and four links. A computation starts when its engine
is free and each input has arrived. A copy starts when its link is free, its source has arrived, all
computations on the device that were issued before it have ended, and its room is really free.
Clocks decide no byte: a wrong rate costs time and never breaks a budget.
"""

from __future__ import annotations

from remat.graph_capture.graph import Op
from remat.graph_capture.links import LINK_NAMES, LinkName, Tier
from remat.schedules.simulation import Copy, Stall


class Clocks:
    """Times of one schedule so far, in microseconds from its start.

    Attributes
    ----------
    now : of each engine. busy : time in which it worked.
    copies : those begun so far, in the order of their steps.
    """

    def __init__(self) -> None:
        self.now: dict[str, float] = dict.fromkeys(("device", "host", *LINK_NAMES), 0.0)
        self.busy = dict.fromkeys(self.now, 0.0)
        self.stalls, self.copies = list[Stall](), list[Copy]()
        # When the copy of a value in a tier is whole, and when the last that reads it ends.
        self.arrives: dict[tuple[Tier, str], float] = {}
        self.is_read_until: dict[tuple[Tier, str], float] = {}
        # Below the device: what was dropped, and when its readers end.
        self.leaving: dict[Tier, list[tuple[float, int]]] = {"host": [], "nvme": []}
        self.left_bytes: dict[Tier, int] = dict.fromkeys(self.leaving, 0)

    def compute(self, step: int, at: Tier, op: Op, made: tuple[str, ...], room_us: float) -> None:
        """Run an op that makes `made` from `room_us` on."""
        for name in made if room_us else ():
            self._wait(step, at, name, room_us)
        for name in op.inputs:
            self._wait(step, at, name, self.arrives.get((at, name), 0.0))
        for name in op.updates:
            self._wait(step, at, name, self.is_read_until.get((at, name), 0.0))
        cost_us = op.cost_us if at == "device" else op.host_cost_us or 0.0
        self.now[at] += cost_us
        self.busy[at] += cost_us
        if at != "device":
            for name in (*made, *op.updates):
                self.arrives[at, name] = self.now[at]
            for name in op.inputs:
                self._read(at, name, self.now[at])

    def copy(self, step: int, link: LinkName, took_us: float, name: str, size_bytes: int,
             source: Tier, to: Tier, room_us: float) -> None:  # fmt: skip
        """Begin a copy whose room is free at `room_us`."""
        start = max(self.now[link], self.arrives.get((source, name), 0.0), room_us)
        if "device" in (source, to):
            start = max(start, self.now["device"])
        self.now[link] = self.arrives[to, name] = start + took_us
        self.busy[link] += took_us
        self.copies.append(Copy(step, link, name, size_bytes, start, start + took_us))
        self._read(source, name, start + took_us)

    def drop(self, step: int, at: Tier, name: str, size_bytes: int) -> None:
        """Drop a copy. The device waits for what reads it; a lower tier has its bytes free then."""
        until = max(self.arrives.pop((at, name), 0.0), self.is_read_until.pop((at, name), 0.0))
        if at == "device":
            self._wait(step, at, name, until)
        else:
            self.leaving[at].append((until, size_bytes))
            self.left_bytes[at] += size_bytes

    def room_us(self, tier: Tier, spare_bytes: float) -> float:
        """When a tier really has room, where its books show `spare_bytes` beyond it."""
        short_bytes = self.left_bytes.get(tier, 0) - spare_bytes
        for until, size_bytes in sorted(self.leaving[tier]) if short_bytes > 0 else ():
            short_bytes -= size_bytes
            if short_bytes <= 0:
                return until
        return 0.0

    def _wait(self, step: int, engine: Tier, name: str, until: float) -> None:
        if until > self.now[engine]:
            self.stalls.append(Stall(step, name, until - self.now[engine]))
            self.now[engine] = until

    def _read(self, tier: Tier, name: str, until: float) -> None:
        self.is_read_until[tier, name] = max(until, self.is_read_until.get((tier, name), 0.0))
