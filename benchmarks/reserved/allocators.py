"""Allocators side by side: what each reserves for a schedule, resident tensors included.

``default`` and ``expandable`` are torch's, replayed. ``arena`` is a layout with no gap, which takes
the bytes that are live at most. ``stitched`` is virtual memory as in GMLake (Guo et al., ASPLOS
2024, https://arxiv.org/abs/2401.08156): a request from 2 MiB on takes any free chunks of 2 MiB,
mapped side by side, so that only the rounding to chunks is lost. Smaller requests go to torch's
small pool. That any chunks serve any request, and that mapping takes no time, are assumptions in
its favour.
"""

from __future__ import annotations

import numpy as np

from remat.formats import MIB
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.layout import Buffers, buffers_of
from remat.schedules.reserved import DEFAULT, EXPANDABLE, allocator_peak, retries_within
from remat.schedules.schedule import Schedule

CHUNK_BYTES = 2 * MIB
"""The least that CUDA maps."""


def reserved_by(graph: TrainingGraph, schedule: Schedule) -> dict[str, int]:
    """Reserved bytes of a schedule by allocator."""
    buffers = buffers_of(graph, schedule)
    return {
        "arena": buffers.resident_bytes + buffers.load_bytes,
        "stitched": stitched_bytes(buffers),
        "expandable": allocator_peak(buffers, EXPANDABLE).reserved_bytes,
        "default": allocator_peak(buffers, DEFAULT).reserved_bytes,
    }


def retries_by(
    graph: TrainingGraph, schedule: Schedule, device_bytes: int
) -> dict[str, int | None]:
    """Retries of torch's allocators in three steps on such a device; None where it runs out."""
    buffers = buffers_of(graph, schedule)
    return {
        "expandable": retries_within(buffers, EXPANDABLE, device_bytes),
        "default": retries_within(buffers, DEFAULT, device_bytes),
    }


def stitched_bytes(buffers: Buffers) -> int:
    """The most chunks that are in use at once, and what the small pool takes."""
    is_large = buffers.size_bytes >= CHUNK_BYTES
    columns = np.stack([buffers.size_bytes, buffers.start, buffers.end])
    sizes, starts, ends = columns[:, is_large]
    chunked = Buffers.of_arrays(-(-sizes // CHUNK_BYTES) * CHUNK_BYTES, starts, ends)
    small = Buffers.of_arrays(*columns[:, ~is_large])
    return (
        buffers.resident_bytes + chunked.load_bytes + allocator_peak(small, DEFAULT).reserved_bytes
    )
