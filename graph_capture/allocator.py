"""How a device's allocator rounds sizes.

The CUDA caching allocator gives out multiples of 512 bytes. From its large pool, blocks above
1 MiB, it may give up to 1 MiB more than that, where less is left over than it would keep apart;
with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` it does not. What it holds and has not
given out counts as reserved, not as allocated. A CPU's allocator gives what is asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from remat.graph_capture.devices.device_table import is_cuda

ALLOCATION_BYTES = 512
"""What the CUDA caching allocator rounds every size up to."""

Allocated = Callable[[int], int]


def rounded(size_bytes: int) -> int:
    """Bytes that the CUDA caching allocator takes for so many."""
    return -(-size_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES


def allocated_on(device: str) -> Allocated:
    """From bytes that are asked for to bytes that are taken, on `device`."""
    return rounded if is_cuda(device) else int
