"""What a schedule makes torch's CUDA caching allocator take from the device: predictions.

It takes more than what is live: it keeps segments, and a free range between two used blocks serves
nothing larger. Temporaries beyond an op's workspace are in no graph. Resident tensors are taken to
lie in full segments of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.caching_allocator import AllocatorBlock, AllocatorSettings, CachingAllocator
from remat.schedules.layout import Buffers, buffers_of
from remat.schedules.schedule import Schedule

# A trace, as a small file: n > 0 asks for n bytes, ``~i`` frees request i, 0 empties the cache.

EMPTY_CACHE = 0


class AllocatorReplay(msgspec.Struct, frozen=True):
    """What became of a trace; `failed_request` ended it, None if all were served."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    reserved_bytes: int
    n_retries: int = 0
    failed_request: int | None = None


def serve_trace(trace: Iterable[int], settings: AllocatorSettings) -> AllocatorReplay:
    allocator, used = CachingAllocator(settings), dict[int, AllocatorBlock]()
    n_requests, failed = 0, None
    for event in trace:
        if event > 0:
            if (block := allocator.malloc(event)) is None:
                failed = n_requests
                break
            used[n_requests] = block
            n_requests += 1
        elif event < 0:
            allocator.free(used.pop(~event))
        else:
            allocator.empty_cache()
    peaks = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
    return AllocatorReplay(*peaks, allocator.reserved_bytes, allocator.n_retries, failed)


def trace_of_steps(buffers: Buffers, n_steps: int = 1) -> list[int]:
    n, sizes = len(buffers), buffers.size_bytes.tolist()
    is_request = np.repeat([0, 1], n)  # at equal times, ends come before starts
    order = np.lexsort((is_request, np.concatenate([buffers.end, buffers.start]))).tolist()
    number = {i - n: count for count, i in enumerate(i for i in order if i >= n)}
    trace = list[int]()
    for step in range(n_steps):
        trace += [sizes[i - n] if i >= n else ~(step * n + number[i]) for i in order]
    return trace


N_STEPS = 3  # the second step finds a cache that the first has cut up, and takes more
DEFAULT = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable_segments=True)
EXPANDABLE_CONF = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"

_IN_MIB = {
    "max_split_size_mb": "max_split_bytes",
    "max_non_split_rounding_mb": "max_non_split_rounding_bytes",
    "large_segment_size_mb": "large_segment_bytes",
}
_OF_THE_HOST = "pinned_"


def settings_of_conf(conf: str) -> AllocatorSettings | None:
    """Of the text of ``PYTORCH_CUDA_ALLOC_CONF``; None where the replay lacks one of them."""
    known: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in conf.split(","))):
        name, _, value = (one.strip() for one in part.partition(":"))
        if name == "expandable_segments" and value in ("True", "False"):
            known[name] = value == "True"
        elif name in _IN_MIB and value.isdecimal():
            known[_IN_MIB[name]] = int(value) << 20
        elif name == "roundup_power2_divisions" and value.isdecimal():
            known[name] = int(value)
        elif part != "backend:native" and not name.startswith(_OF_THE_HOST):
            return None
    return AllocatorSettings(**known)


class AllocatorPeak(msgspec.Struct, frozen=True):
    """Bytes of a device at their most, resident tensors included."""

    allocated_bytes: int  # in whole blocks, as torch counts: more than `simulate` finds
    reserved_bytes: int  # as ``torch.cuda.max_memory_reserved`` says


class Reserved(msgspec.Struct, frozen=True):
    default: AllocatorPeak  # with the allocator as it is
    expandable: AllocatorPeak  # with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``


def reserved_of(graph: TrainingGraph, schedule: Schedule) -> Reserved:
    buffers = buffers_of(graph, schedule)
    # Each step drops its gradients before the next one begins.
    return Reserved(allocator_peak(buffers, DEFAULT), allocator_peak(buffers, EXPANDABLE))


def allocator_peak(
    buffers: Buffers, settings: AllocatorSettings, n_steps: int = N_STEPS
) -> AllocatorPeak:
    """`settings` have no limit of capacity, so all is served."""
    found = serve_trace(trace_of_steps(buffers, n_steps), settings)
    return AllocatorPeak(
        allocated_bytes=buffers.resident_bytes + found.peak_allocated_bytes,
        reserved_bytes=buffers.resident_bytes + found.peak_reserved_bytes,
    )


def retries_within(
    buffers: Buffers, settings: AllocatorSettings, device_bytes: int, n_steps: int = N_STEPS
) -> int | None:
    """How often a device of that size is full and frees; None if it runs out of memory."""
    left_bytes = device_bytes - buffers.resident_bytes
    settings = msgspec.structs.replace(settings, capacity_bytes=left_bytes)
    found = serve_trace(trace_of_steps(buffers, n_steps), settings)
    return found.n_retries if found.failed_request is None else None
