"""Links between tiers of memory: how fast they copy, and how much room is below the device.

A graph without links is planned for its device alone. A peak never depends on a link's rate: a
wrong rate costs time and cannot break a budget.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from remat.graph_capture.errors import GraphError

Tier = Literal["device", "host", "nvme"]
TIERS: tuple[Tier, ...] = ("device", "host", "nvme")
"""Kinds of memory, from the fastest down. A copy goes one tier down, or one up."""
LOWER_TIERS: tuple[Tier, ...] = ("host", "nvme")
LinkName = Literal["d2h", "h2d", "write", "read"]
LINK_NAMES: tuple[LinkName, ...] = ("d2h", "h2d", "write", "read")
LINK_TITLES: dict[LinkName, str] = {
    "d2h": "device to host", "h2d": "host to device", "write": "host to NVMe",
    "read": "NVMe to host",
}  # fmt: skip
WAYS: dict[tuple[Tier, Tier], LinkName] = {
    ("device", "host"): "d2h", ("host", "device"): "h2d", ("host", "nvme"): "write",
    ("nvme", "host"): "read",
}  # fmt: skip
"""The link from one tier to another."""


class Link(msgspec.Struct, frozen=True):
    """One way between two tiers.

    Attributes
    ----------
    bytes_per_us : sustained rate. latency_us : what each copy takes beside its bytes.
    """

    bytes_per_us: float
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.bytes_per_us < math.inf and 0 <= self.latency_us < math.inf):
            raise GraphError(
                f"a link of {self.bytes_per_us} bytes and {self.latency_us} us: its rate is "
                "positive and finite, its latency finite and from 0 on"
            )

    def us(self, size_bytes: int) -> float:
        """Time of one copy."""
        return self.latency_us + size_bytes / self.bytes_per_us


class Links(msgspec.Struct, frozen=True):
    """What lies below the device, and the ways there.

    Attributes
    ----------
    d2h, h2d : device to host, and back. host_bytes : room on the host.
    write, read : host to NVMe, and back; None without one. nvme_bytes : room there.
    nvme_path : the folder that the files are in. source : where the rates come from, in words.
    """

    d2h: Link
    h2d: Link
    host_bytes: int
    write: Link | None = None
    read: Link | None = None
    nvme_bytes: int = 0
    nvme_path: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if self.host_bytes < 0 or self.nvme_bytes < 0:
            raise GraphError("the room on the host and on NVMe is 0 bytes or more")
        if (self.write is None) != (self.read is None):
            raise GraphError("NVMe is written and read: give both links, or none")

    def link(self, name: LinkName) -> Link | None:
        """The link of that name; None where there is no NVMe."""
        return getattr(self, name)

    def room_bytes(self, tier: Tier) -> float:
        """Room in a tier; that of the device is a budget's matter."""
        rooms = {"device": math.inf, "host": self.host_bytes, "nvme": self.nvme_bytes}
        return rooms[tier]

    def slower(self, share: float) -> Links:
        """The same links at that share of their rates."""
        slow = {
            name: Link(link.bytes_per_us * share, link.latency_us)
            for name in LINK_NAMES
            for link in (self.link(name),)
            if link is not None
        }
        return msgspec.structs.replace(self, **slow)
