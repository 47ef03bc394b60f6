"""How fast a CUDA device copies to and from pinned memory of its host, and to memory that is not.

Copies go over two streams, one each way, and are timed by events of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from remat.graph_capture.devices.link_speeds import GB_PER_US, PINNED, LinkPair, speed_of

SIZES = tuple(1 << shift for shift in (16, 20, 24, 26, 28))
"""64 KiB to 256 MiB."""
REPEATS = 10


class Copying(NamedTuple):
    """Copies of `source` to `target` on a stream."""

    stream: torch.cuda.Stream
    target: Tensor
    source: Tensor


class Row(NamedTuple):
    """Microseconds of one copy of a size, by case."""

    down: float
    up: float
    both_down: float
    both_up: float
    pageable: float


def pinned_pair(device: str) -> LinkPair:
    """Both ways between a CUDA device and pinned memory."""
    with torch.cuda.device(device):
        rows = {size: copies_us(device, size) for size in SIZES}
    by_size = {
        case: {size: getattr(row, case) for size, row in rows.items()} for case in Row._fields
    }
    largest = SIZES[-1]
    return LinkPair(
        speed_of(by_size["down"], by_size["both_down"]),
        speed_of(by_size["up"], by_size["both_up"]),
        PINNED,
        largest / by_size["pageable"][largest] / GB_PER_US,
    )


def copies_us(device: str, size_bytes: int) -> Row:
    """Copies of one size, each way alone and both at once."""
    below, above = torch.cuda.Stream(), torch.cuda.Stream()
    on_device = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    pinned = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    pageable = torch.empty(size_bytes, dtype=torch.uint8)
    down = Copying(below, pinned[0], on_device[0])
    up = Copying(above, on_device[1], pinned[1])
    copy_us((down, up))  # the first ones pay for the streams
    both_down_us, both_up_us = copy_us((down, up))
    return Row(
        copy_us((down,))[0], copy_us((up,))[0], both_down_us, both_up_us,
        copy_us((Copying(below, pageable, on_device[0]),))[0],
    )  # fmt: skip


def copy_us(jobs: Sequence[Copying]) -> list[float]:
    """Microseconds of one copy of each job, all jobs at once."""
    torch.cuda.synchronize()
    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for job in jobs:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(job.stream):
            start.record()
            for _ in range(REPEATS):
                job.target.copy_(job.source, non_blocking=True)
            end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) / REPEATS for start, end in spans]
