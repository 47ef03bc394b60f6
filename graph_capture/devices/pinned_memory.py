"""Pinned memory of the host, and how fast a CUDA device copies to and from it."""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat.graph_capture.devices.cuda import CYCLES_PER_US
from remat.graph_capture.devices.links import (
    BYTES_PER_US_IN_GB_S,
    PINNED_MEMORY,
    LinkPair,
    speed_of,
)
from remat.graph_capture.errors import TierError, option
from remat.graph_capture.torch_private.core import cuda_sleep

_PORTABLE = 1  # ``cudaHostRegisterPortable``: pinned for all devices of the process


class _Mapping(mmap.mmap):
    """Memory that is given back to the driver before it is given back to the system."""

    address = 0
    unregister: Any = None

    def __del__(self) -> None:
        if self.unregister is not None:  # `weakref.finalize` is too late: a mapping ends before
            self.unregister(self.address)


def pinned(size_bytes: int) -> Tensor:
    """A uint8 tensor of new pinned memory, which is given back when nothing holds it."""
    try:  # registered with the driver, as torch's pinned memory rounds up to a power of two
        memory = _Mapping(-1, size_bytes)
    except OSError as error:
        raise _unpinnable(size_bytes, str(error)) from error
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()
    memory.address = whole.data_ptr()
    if status := int(runtime.cudaHostRegister(memory.address, size_bytes, _PORTABLE)):
        raise _unpinnable(size_bytes, f"cudaHostRegister says {status}")
    memory.unregister = runtime.cudaHostUnregister
    return whole


def _unpinnable(size_bytes: int, why: str) -> TierError:
    return TierError(
        f"give a smaller {option('host')}, raise the limit on locked memory (ulimit -l), or solve "
        f"without offloading: the host cannot pin the {size_bytes} bytes that this plan copies "
        f"there ({why})"
    )


# How fast a CUDA device copies to and from it, and to memory that is not pinned.

SIZES = tuple(1 << shift for shift in (16, 20, 24, 26))  # 64 KiB to 64 MiB
REPEATS, _SERIES = 10, 5  # copies of a series, and series: the median of these counts
_AHEAD_US = 1_000  # the device sleeps while all is queued: the host takes longer than small copies


class _Copying(NamedTuple):
    stream: torch.cuda.Stream
    target: Tensor
    source: Tensor


class _Row(NamedTuple):
    """Microseconds of one copy of a size, by case."""

    down: float
    up: float
    both_down: float
    both_up: float
    pageable: float


def pinned_pair(device: str) -> LinkPair:
    with torch.cuda.device(device):
        rows = {size: copies_us(device, size) for size in SIZES}
        torch.cuda.empty_cache()  # a step asks for no such blocks
    down, up, both_down, both_up, pageable = (
        {size: row[case] for size, row in rows.items()} for case in range(len(_Row._fields))
    )
    pageable_gb_s = SIZES[-1] / pageable[SIZES[-1]] / BYTES_PER_US_IN_GB_S
    return LinkPair(speed_of(down, both_down), speed_of(up, both_up), PINNED_MEMORY, pageable_gb_s)


def copies_us(device: str, size_bytes: int) -> _Row:
    below, above = torch.cuda.Stream(), torch.cuda.Stream()  # in one, copies would wait
    on_device = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    on_host = [pinned(size_bytes) for _ in range(2)]
    pageable = torch.empty(size_bytes, dtype=torch.uint8)
    down = _Copying(below, on_host[0], on_device[0])
    up = _Copying(above, on_device[1], on_host[1])
    _copy_us((down, up))  # the first ones pay for the streams
    both_down_us, both_up_us = _copy_us((down, up))
    return _Row(
        _copy_us((down,))[0], _copy_us((up,))[0], both_down_us, both_up_us,
        _copy_us((_Copying(below, pageable, on_device[0]),))[0],
    )  # fmt: skip


def _copy_us(jobs: Sequence[_Copying]) -> list[float]:
    """Microseconds of one copy of each job, all jobs at once."""
    series = [_series_us(jobs) for _ in range(_SERIES)]
    return [statistics.median(each) for each in zip(*series, strict=True)]


def _series_us(jobs: Sequence[_Copying]) -> list[float]:
    torch.cuda.synchronize()  # an idle device: with a full queue the host would wait
    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for job in jobs:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(job.stream):
            cuda_sleep(CYCLES_PER_US * _AHEAD_US)
            start.record()
            for _ in range(REPEATS):
                job.target.copy_(job.source, non_blocking=True)
            end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) / REPEATS for start, end in spans]
