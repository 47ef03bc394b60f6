"""Links for tests: their rates are round numbers, and there is room for all."""

from __future__ import annotations

import msgspec

from remat.graph_capture.graph import Link, Links, TrainingGraph

GB_S = 1e3
"""Bytes a microsecond."""


def links(gb_s: float = 50.0, *, latency_us: float = 10.0, host_bytes: int = 1 << 60,
          nvme_bytes: int = 1 << 60, nvme_gb_s: float = 5.0) -> Links:  # fmt: skip
    """The same rate both ways, and NVMe below the host."""
    link, disk = Link(gb_s * GB_S, latency_us), Link(nvme_gb_s * GB_S, latency_us)
    return Links(link, link, host_bytes, disk, disk, nvme_bytes, source="a test")


def with_links(graph: TrainingGraph, found: Links | None = None) -> TrainingGraph:
    """`graph` with links."""
    return msgspec.structs.replace(graph, links=found or links())
