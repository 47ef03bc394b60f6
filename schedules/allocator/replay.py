"""A trace of requests through the allocator: what it reserves, and which request fails.

A trace is a list of integers, so that it is a small file: ``n > 0`` asks for n bytes, ``~i`` (below
0) frees what request i was given, 0 empties the cache. Requests are numbered from 0 as they come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from remat.schedules.allocator.blocks import Block
from remat.schedules.allocator.caching_allocator import CachingAllocator
from remat.schedules.allocator.settings import AllocatorSettings

EMPTY_CACHE = 0

Integers = npt.NDArray[np.integer]


class Replayed(msgspec.Struct, frozen=True):
    """What became of a trace.

    Attributes
    ----------
    peak_allocated_bytes, peak_reserved_bytes : the most in use, and the most that was taken from
        the device. reserved_bytes : what is taken in the end.
    failed_request : number of the request that found no memory, which ends the replay; None if all
        were served.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    reserved_bytes: int
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
        failed_request=failed,
    )


def trace_of_steps(
    size_bytes: Integers, start: Integers, end: Integers, n_steps: int = 1
) -> list[int]:
    """The trace of buffers that are live in ``[start, end)``, over equal steps one after another.

    Parameters
    ----------
    size_bytes, start, end : one entry a buffer. What begins at the same time is asked for in the
        order of the entries, after all that ends then was freed. All sizes are above 0.
    n_steps : every buffer is freed before the next step begins.
    """
    n = len(size_bytes)
    times = np.concatenate([end, start])
    is_start = np.repeat([0, 1], n)
    order = np.lexsort((np.tile(np.arange(n), 2), is_start, times))
    number = np.empty(n, np.int64)
    begun = order[order >= n] - n
    number[begun] = np.arange(n)
    sizes = np.asarray(size_bytes, np.int64)
    buffer, asks = order % n if n else order, order >= n
    events: Sequence[int] = np.where(asks, sizes[buffer], ~number[buffer]).tolist()
    trace = list[int]()
    for step in range(n_steps):
        trace += [event if event > 0 else event - step * n for event in events]
    return trace
