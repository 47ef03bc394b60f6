"""A replay of the rules of torch's CUDA caching allocator: what it reserves for which requests.

Rules of PyTorch 2.11 to 2.14 (``c10/cuda/CUDACachingAllocator.cpp``,
https://github.com/pytorch/pytorch), for one device and one stream:

- Sizes are rounded up to multiples of 512 bytes. Blocks up to 1 MiB come from one pool, larger ones
  from another.
- A request takes the smallest free block that is large enough; of equal ones, that at the lowest
  address. What is left of it is split off.
- Where there is none, a segment is taken from the device: 2 MiB for small blocks, 20 MiB for blocks
  below 10 MiB, else the size rounded up to 2 MiB. Or, with expandable segments, a range grows.
- A freed block joins its free neighbours, and stays reserved.
- Only where the device is full are free segments given back to it.

Not replayed: garbage collection (``garbage_collection_threshold``), private pools, several streams.
`tests/schedules/allocator` holds it against the figures of torch's own library.
"""

from __future__ import annotations

from remat.schedules.allocator.blocks import Block, Device, Pool
from remat.schedules.allocator.segments import ExpandableSegments, FixedSegments, Segments
from remat.schedules.allocator.settings import (
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    UNLIMITED_BYTES,
    AllocatorSettings,
)


class CachingAllocator:
    """The allocator of one device, for one stream.

    Attributes
    ----------
    allocated_bytes, peak_allocated_bytes : in blocks that are used, now and at most. torch's
        ``memory_allocated`` counts these whole blocks too.
    n_retries : how often the device was full, so that all that was free went back to it. torch
        counts them as ``num_alloc_retries``; each one waits for the device.

    >>> allocator = CachingAllocator(AllocatorSettings())
    >>> block = allocator.malloc(3 << 20)
    >>> allocator.allocated_bytes >> 20, allocator.reserved_bytes >> 20
    (3, 20)
    """

    def __init__(self, settings: AllocatorSettings) -> None:
        self._settings = settings
        self._device = Device(settings.capacity_bytes)
        self._small, self._large = Pool(is_small=True), Pool(is_small=False)
        self._segments: Segments = (
            ExpandableSegments(settings, self._device)
            if settings.expandable_segments
            else FixedSegments(settings, self._device)
        )
        self.allocated_bytes = self.peak_allocated_bytes = self.n_retries = 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the device now."""
        return self._device.reserved

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that were taken from the device."""
        return self._device.peak_reserved

    def malloc(self, asked_bytes: int) -> Block | None:
        """A block of at least `asked_bytes`, which must be above 0.

        None is out of memory: the device has no room, also after free segments went back to it.
        """
        size = self._settings.block_bytes(asked_bytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._best_fit(pool, size) or self._from_device(pool, size)
        if block is None:
            return None
        if self._is_split(block, size):
            rest, block = block, block.cut_off(size)
            pool.add(rest)
        block.is_used = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block of `malloc` back to its pool, joined with its free neighbours."""
        self.allocated_bytes -= block.size
        block.is_used = False
        block.join()
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give to the device all that is free in whole segments, or in whole pages."""
        for pool in (self._large, self._small):
            for _, _, block in list(pool.free):
                self._segments.give_back(block)

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        i = pool.first_of(size)
        if self._settings.expandable_segments:
            i = _least_reach(pool, i)
        if i == len(pool.free) or not self._may_take(pool.free[i][0], size):
            return None
        block = pool.free[i][2]
        del pool.free[i]
        return block

    def _may_take(self, block_bytes: int, size: int) -> bool:
        """Blocks that are never split are kept for requests of about their size."""
        least = self._settings.max_split_bytes
        if size < least:
            return block_bytes < least
        settings = self._settings
        most_left = max(settings.max_non_split_rounding_bytes, settings.large_segment_bytes)
        return block_bytes < size + most_left

    def _is_split(self, block: Block, size: int) -> bool:
        left_over = block.size - size
        if block.pool.is_small or self._settings.expandable_segments:
            return left_over >= MIN_BLOCK_BYTES
        return left_over > SMALL_BYTES and size < self._settings.max_split_bytes

    def _from_device(self, pool: Pool, size: int) -> Block | None:
        """More memory; where there is none, after giving back what others do not use."""
        grow = self._segments.grow
        block = grow(pool, size)
        if block is None and self._gave_unsplit_back(pool, size):
            block = grow(pool, size)
        if block is None:
            self.n_retries += 1
            self.empty_cache()
            block = grow(pool, size)
        return block

    def _gave_unsplit_back(self, pool: Pool, size: int) -> bool:
        """Give back a free block that is never split, or the largest ones; whether that will do."""
        least = self._settings.max_split_bytes
        if least == UNLIMITED_BYTES or self._settings.expandable_segments:
            return False
        wanted, gone = max(size, least), 0
        i = pool.first_of(wanted)
        blocks = [pool.free[i][2]] if i < len(pool.free) else _largest_down_to(pool, least)
        for block in blocks:
            if gone < wanted:
                gone += block.size
                self._segments.give_back(block)
        return gone >= wanted


def _least_reach(pool: Pool, i: int) -> int:
    """In expandable segments a block counts for as much as it can grow to."""

    def reach(block: Block) -> int:
        room = block.after
        return block.size + (room.size if room is not None and not room.is_mapped else 0)

    while i + 1 < len(pool.free) and reach(pool.free[i + 1][2]) < reach(pool.free[i][2]):
        i += 1
    return i


def _largest_down_to(pool: Pool, least: int) -> list[Block]:
    return [block for size, _, block in reversed(pool.free) if size >= least]
