"""A trace of requests through the allocator: what it reserves, and which request fails.

A trace is a list of integers, so that it is a small file: ``n > 0`` asks for n bytes, ``~i`` (below
0) frees what request i was given, 0 empties the cache. Requests are numbered from 0 as they come.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from remat.schedules.allocator.blocks import Block
from remat.schedules.allocator.caching_allocator import CachingAllocator
from remat.schedules.allocator.settings import AllocatorSettings
from remat.schedules.buffers import Buffers

EMPTY_CACHE = 0


class Replayed(msgspec.Struct, frozen=True):
    """What became of a trace.

    Attributes
    ----------
    peak_allocated_bytes, peak_reserved_bytes : the most in use, and the most that was taken from
        the device. reserved_bytes : what is taken in the end.
    n_retries : how often the device was full, so that all that was free went back to it.
    failed_request : number of the request that found no memory, which ends the replay; None if all
        were served.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    reserved_bytes: int
    n_retries: int = 0
    failed_request: int | None = None


def replay(trace: Iterable[int], settings: AllocatorSettings) -> Replayed:
    """Serve all requests of a trace, or those before the first that fails."""
    allocator, used = CachingAllocator(settings), dict[int, Block]()
    n_requests, failed = 0, None
    for event in trace:
        if event > 0:
            block = allocator.malloc(event)
            if block is None:
                failed = n_requests
                break
            used[n_requests] = block
            n_requests += 1
        elif event < 0:
            allocator.free(used.pop(~event))
        else:
            allocator.empty_cache()
    return Replayed(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        reserved_bytes=allocator.reserved_bytes,
        n_retries=allocator.n_retries,
        failed_request=failed,
    )


def trace_of_steps(buffers: Buffers, n_steps: int = 1) -> list[int]:
    """The trace of equal steps one after another; each frees all of its buffers in the end.

    At each time, what ends is freed before anything is asked for. What begins is asked for in the
    order of the buffers.
    """
    n, sizes = len(buffers), buffers.size_bytes.tolist()
    is_request = np.repeat([0, 1], n)
    order = np.lexsort((is_request, np.concatenate([buffers.end, buffers.start]))).tolist()
    number = {i - n: count for count, i in enumerate(i for i in order if i >= n)}
    trace = list[int]()
    for step in range(n_steps):
        trace += [sizes[i - n] if i >= n else ~(step * n + number[i]) for i in order]
    return trace
