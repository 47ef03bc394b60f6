"""How fast memory is copied between two tiers: as measured, and as plans are made with it.

A link is measured alone and with the other way busy, since a step copies both ways at once. Plans
take the second, less a tenth: a link that plans load to the full is late in every step in which it
is a little slower, and its stalls then add up.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from remat.graph_capture.graph import MOST_US, Link

PLANNED_SHARE = 0.9
"""Of a measured rate, with which plans are made. A GPT on an RTX 4090 that was planned at the full
rate took 7.7 % more than eager on a link of 95 % of it, and 11.3 % on one of 90 %, where 5.3 % were
planned."""
BYTES_PER_US_IN_GB_S = 1e3
"""Bytes a microsecond in a GB/s."""
MOST_GB_S = 1e6
PINNED_MEMORY = "pinned memory"
"""The place below a CUDA device. Copies to memory that is not pinned are slow, and wait."""


class LinkSpeed(msgspec.Struct, frozen=True):
    """One way between two tiers."""

    gb_s: float  # 10⁹ bytes a second, alone
    both_gb_s: float  # with the other way busy
    latency_us: float  # of each copy, beside its bytes

    @property
    def planned(self) -> Link:
        # A step copies both ways at once.
        return Link(PLANNED_SHARE * self.both_gb_s * BYTES_PER_US_IN_GB_S, self.latency_us)


class LinkPair(msgspec.Struct, frozen=True):
    """Both ways between a tier and the one below."""

    down: LinkSpeed  # to the lower tier
    up: LinkSpeed
    place: str  # the lower tier: ``pinned memory``, or the folder of its files
    pageable_gb_s: float = 0.0  # down to memory that is not pinned; 0 where there is none
    threads_gb_s: dict[int, float] = {}  # there and back, by more threads a copy

    def __str__(self) -> str:
        text = (
            f"{self.down.gb_s:.3g} GB/s to {self.place} and {self.up.gb_s:.3g} back; at once "
            f"{self.down.both_gb_s:.3g} and {self.up.both_gb_s:.3g}"
        )
        if self.pageable_gb_s:
            text += f"; {self.pageable_gb_s:.3g} to memory that is not pinned"
        more = [f"{n} threads {gb_s:.3g}" for n, gb_s in self.threads_gb_s.items()]
        return text + (f"; a copy by {', by '.join(more)}" if more else "")


class LinkSpeeds(msgspec.Struct, frozen=True):
    """Those that were measured between device and host, and host and NVMe."""

    host: LinkPair
    nvme: LinkPair | None = None


def are_speeds(pair: LinkPair) -> bool:
    ways = pair.down, pair.up
    others = (pair.pageable_gb_s, *pair.threads_gb_s.values())
    return all(0 <= gb_s <= MOST_GB_S for gb_s in others) and all(
        0 < way.gb_s <= MOST_GB_S
        and 0 < way.both_gb_s <= MOST_GB_S
        and 0 <= way.latency_us <= MOST_US
        for way in ways
    )


def fitted(times_us: Mapping[int, float]) -> tuple[float, float]:
    """Rate in GB/s and latency in µs, from times of a copy by its bytes; of two sizes or more."""
    # latency + size / rate = time, each equation divided by its time, so that small copies count.
    rows = np.array([(1 / time_us, size / time_us) for size, time_us in times_us.items()])
    latency_us, us_per_byte = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0].tolist()
    if latency_us < 0 or us_per_byte <= 0:  # noise: all of the time is of the bytes
        latency_us, us_per_byte = 0.0, float(rows[:, 1].sum() / (rows[:, 1] ** 2).sum())
    return 1 / us_per_byte / BYTES_PER_US_IN_GB_S, latency_us


def speed_of(alone_us: Mapping[int, float], both_us: Mapping[int, float]) -> LinkSpeed:
    """One way, from the times of its copies by size: alone, and with the other way busy."""
    gb_s, latency_us = fitted(alone_us)
    both_gb_s, both_latency_us = fitted(both_us)
    # By noise alone a fit can say that a busy link is faster.
    return LinkSpeed(gb_s, min(gb_s, both_gb_s), max(latency_us, both_latency_us))
