"""A replay of torch's CUDA caching allocator, for one device and one stream: what it reserves.

Rules of PyTorch 2.11 to 2.14 (``c10/cuda/CUDACachingAllocator.cpp`` of
https://github.com/pytorch/pytorch): sizes are multiples of 512 bytes, and blocks up to 1 MiB have a
pool of their own. A request takes the smallest free block that is large enough, at the lowest
address, and splits off the rest. Where there is none, a segment comes from the device: 2 MiB for
small blocks, 20 MiB for blocks below 10 MiB, else the size rounded up to 2 MiB. An expandable
segment grows. Freed blocks join their free neighbours and stay reserved until the device is full.
Not replayed: garbage collection and private pools. `tests/schedules/allocator` has torch's figures.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from dataclasses import dataclass, field

import msgspec

from remat.formats import MIB

# ``c10/core/AllocatorConfig.h``. ``PYTORCH_ALLOC_CONF`` has the same settings, in MiB.
_MIN_BLOCK_BYTES = 512  # every block is a multiple of it
_SMALL_BYTES = MIB  # blocks up to it come from the small pool, larger ones from the large pool
_SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
_OWN_SEGMENT_BYTES = 10 * MIB  # from this size on, a block without room gets a segment of its size
_SEGMENT_MULTIPLE_BYTES = 2 * MIB  # segments of their own size are a multiple of it
UNLIMITED_BYTES = 1 << 50


def _multiple_above(size_bytes: int, unit_bytes: int) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes


class AllocatorSettings(msgspec.Struct, frozen=True):
    expandable_segments: bool = False  # one growing range a pool in place of segments
    max_split_bytes: int = UNLIMITED_BYTES  # blocks from this size on serve large requests, whole
    # How much larger than its request such a block may be; at least `large_segment_bytes`.
    max_non_split_rounding_bytes: int = 0
    # So many steps between two powers of two; 0 rounds to multiples of 512 bytes.
    roundup_power2_divisions: int = 0
    large_segment_bytes: int = LARGE_SEGMENT_BYTES  # shared by large blocks; a page if expandable
    capacity_bytes: int = UNLIMITED_BYTES

    def block_bytes(self, asked_bytes: int) -> int:
        """Bytes that a request of more than 0 takes of a block that can be split."""
        divisions = self.roundup_power2_divisions
        if divisions <= 1 or asked_bytes <= _MIN_BLOCK_BYTES * divisions:
            return _multiple_above(asked_bytes, _MIN_BLOCK_BYTES)
        power_of_two = 1 << (asked_bytes.bit_length() - 1)
        return _multiple_above(asked_bytes, power_of_two // divisions)

    def segment_bytes(self, block_bytes: int) -> int:
        if block_bytes <= _SMALL_BYTES:
            return _SMALL_SEGMENT_BYTES
        if block_bytes < _OWN_SEGMENT_BYTES:
            return self.large_segment_bytes
        return _multiple_above(block_bytes, _SEGMENT_MULTIPLE_BYTES)

    def page_bytes(self, is_small: bool) -> int:
        return _SMALL_SEGMENT_BYTES if is_small else self.large_segment_bytes


@dataclass(eq=False)
class AllocatorBlock:
    """A range of addresses in one segment; `before` and `after` are its neighbours there."""

    size: int
    address: int
    pool: _Pool
    is_used: bool = False
    is_mapped: bool = True  # else it is room in an expandable segment: addresses without memory
    before: AllocatorBlock | None = None
    after: AllocatorBlock | None = None

    @property
    def is_whole_segment(self) -> bool:
        return self.before is None and self.after is None

    def put_between(self, before: AllocatorBlock | None, after: AllocatorBlock | None) -> None:
        self.before, self.after = before, after
        if before is not None:
            before.after = self
        if after is not None:
            after.before = self

    def cut_off(self, size: int) -> AllocatorBlock:
        """The first `size` bytes, as a block of their own; the rest stays with this one."""
        first = AllocatorBlock(size, self.address, self.pool, is_mapped=self.is_mapped)
        first.put_between(self.before, self)
        self.address += size
        self.size -= size
        return first

    def join(self) -> None:
        for other in (self.before, self.after):
            # Mapped and unmapped ranges stay separate blocks: only mapped ones have memory.
            if other is None or other.is_used or other.is_mapped != self.is_mapped:
                continue
            other.pool.drop(other)
            if other is self.before:
                self.address = other.address
                self.put_between(other.before, self.after)
            else:
                self.put_between(self.before, other.after)
            self.size += other.size


@dataclass(eq=False)
class _Pool:
    """Free blocks by size, then address; and unmapped ones by address."""

    is_small: bool
    free: list[tuple[int, int, AllocatorBlock]] = field(
        default_factory=list[tuple[int, int, AllocatorBlock]]
    )
    unmapped: list[tuple[int, AllocatorBlock]] = field(
        default_factory=list[tuple[int, AllocatorBlock]]
    )

    def add(self, block: AllocatorBlock) -> None:
        if block.is_mapped:  # addresses are unique, so that blocks themselves are never compared
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def drop(self, block: AllocatorBlock) -> None:
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def first_of(self, size: int) -> int:
        """Index of the smallest free block of at least `size`; the end if there is none."""
        return bisect_left(self.free, (size, 0))  # no address is 0


@dataclass
class _Device:
    capacity: int
    reserved: int = 0
    peak_reserved: int = 0
    next_address: int = 1 << 40

    def take(self, size: int) -> bool:
        if self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def give_back(self, size: int) -> None:
        self.reserved -= size

    def addresses(self, size: int, unit: int) -> int:
        """Where a new range begins, at a multiple of `unit`."""
        address = _multiple_above(self.next_address, unit)
        self.next_address = address + size + unit  # so no blocks of two ranges are neighbours
        return address


# Segments have a fixed size, or are a range of addresses into which pages are mapped.


class _Segments(ABC):
    def __init__(self, settings: AllocatorSettings, device: _Device) -> None:
        self._settings, self._device = settings, device

    @abstractmethod
    def grow(self, pool: _Pool, size: int) -> AllocatorBlock | None:
        """A block of at least `size` in no pool; None where the device has no room for it."""

    @abstractmethod
    def give_back(self, block: AllocatorBlock) -> None:
        """Give to the device what can be given of a block that is free in its pool."""


class _FixedSegments(_Segments):
    def grow(self, pool: _Pool, size: int) -> AllocatorBlock | None:
        segment = self._settings.segment_bytes(size)
        if not self._device.take(segment):
            return None
        address = self._device.addresses(segment, _SEGMENT_MULTIPLE_BYTES)
        return AllocatorBlock(segment, address, pool)

    def give_back(self, block: AllocatorBlock) -> None:
        if block.is_whole_segment:  # torch returns a segment only as a whole
            block.pool.drop(block)
            self._device.give_back(block.size)


class _ExpandableSegments(_Segments):
    def grow(self, pool: _Pool, size: int) -> AllocatorBlock | None:
        first = self._room(pool, size)
        block = first if first.is_mapped else self._map(first, min(first.size, size))
        while block is not None and block.size < size:
            room = block.after
            assert room is not None  # `_room` has made sure of it
            # Pages mapped so far stay mapped and free if this one finds no memory.
            block = self._map(room, min(size - block.size, room.size))
        if block is not None:
            pool.drop(block)
        return block

    def give_back(self, block: AllocatorBlock) -> None:
        page = self._settings.page_bytes(block.pool.is_small)
        end = block.address + block.size
        # Only whole pages can be unmapped.
        low, high = _multiple_above(block.address, page), end // page * page
        if high <= low:
            return
        block.pool.drop(block)
        if block.address < low:
            block.pool.add(block.cut_off(low - block.address))
        pages = block.cut_off(high - low) if high < end else block
        if pages is not block:
            block.pool.add(block)
        pages.is_mapped = False
        self._device.give_back(pages.size)
        pages.join()
        pages.pool.add(pages)

    def _room(self, pool: _Pool, size: int) -> AllocatorBlock:
        """The first of neighbours that are free or unmapped and have `size` together."""
        for _, room in pool.unmapped:
            first = room if room.before is None or room.before.is_used else room.before
            if _reaches(first, size):
                return first
        page = self._settings.page_bytes(pool.is_small)
        # 9/8 of the device, as in torch.
        length = _multiple_above(self._device.capacity + self._device.capacity // 8, page)
        room = AllocatorBlock(length, self._device.addresses(length, page), pool, is_mapped=False)
        pool.add(room)
        return room

    def _map(self, room: AllocatorBlock, size: int) -> AllocatorBlock | None:
        page = self._settings.page_bytes(room.pool.is_small)
        mapped = min(_multiple_above(size, page), room.size)
        if not self._device.take(mapped):
            return None
        room.pool.drop(room)
        pages = room.cut_off(mapped) if mapped < room.size else room
        if pages is not room:
            room.pool.add(room)
        pages.is_mapped = True
        pages.join()
        pages.pool.add(pages)
        return pages


def _reaches(first: AllocatorBlock, size: int) -> bool:
    found, block = 0, first
    while found < size and not block.is_used:
        found += block.size
        if block.after is None:
            break
        block = block.after
    return found >= size


class CachingAllocator:
    """`allocated_bytes` counts whole blocks, as ``memory_allocated`` does; `n_retries` are waits.

    >>> allocator = CachingAllocator(AllocatorSettings())
    >>> block = allocator.malloc(3 << 20)
    >>> allocator.allocated_bytes >> 20, allocator.reserved_bytes >> 20
    (3, 20)
    """

    def __init__(self, settings: AllocatorSettings) -> None:
        self._settings = settings
        self._device = _Device(settings.capacity_bytes)
        self._small, self._large = _Pool(is_small=True), _Pool(is_small=False)
        segments = _ExpandableSegments if settings.expandable_segments else _FixedSegments
        self._segments = segments(settings, self._device)
        self.allocated_bytes = self.peak_allocated_bytes = self.n_retries = 0

    @property
    def reserved_bytes(self) -> int:
        return self._device.reserved

    @property
    def peak_reserved_bytes(self) -> int:
        return self._device.peak_reserved

    def malloc(self, asked_bytes: int) -> AllocatorBlock | None:
        """A block of at least `asked_bytes`, which must be above 0; None is out of memory."""
        size = self._settings.block_bytes(asked_bytes)
        pool = self._small if size <= _SMALL_BYTES else self._large
        # Ask the device only if no free block is large enough.
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

    def free(self, block: AllocatorBlock) -> None:
        self.allocated_bytes -= block.size
        block.is_used = False
        block.join()
        block.pool.add(block)

    def empty_cache(self) -> None:
        for pool in (self._large, self._small):
            for _, _, block in list(pool.free):  # a copy: blocks leave the pool meanwhile
                self._segments.give_back(block)

    def _best_fit(self, pool: _Pool, size: int) -> AllocatorBlock | None:
        i = pool.first_of(size)
        if self._settings.expandable_segments:
            i = _least_reach(pool, i)  # torch ranks a block by the size that it can grow to
        if i == len(pool.free) or not self._may_take(pool.free[i][0], size):
            return None
        block = pool.free[i][2]
        del pool.free[i]
        return block

    def _may_take(self, block_bytes: int, size: int) -> bool:
        least = self._settings.max_split_bytes
        if size < least:  # oversized blocks are kept for requests of about their size
            return block_bytes < least
        settings = self._settings
        most_left = max(settings.max_non_split_rounding_bytes, settings.large_segment_bytes)
        return block_bytes < size + most_left

    def _is_split(self, block: AllocatorBlock, size: int) -> bool:
        left_over = block.size - size
        if block.pool.is_small or self._settings.expandable_segments:
            return left_over >= _MIN_BLOCK_BYTES
        # A rest of up to 1 MiB is useless in the large pool.
        return left_over > _SMALL_BYTES and size < self._settings.max_split_bytes

    def _from_device(self, pool: _Pool, size: int) -> AllocatorBlock | None:
        grow = self._segments.grow
        block = grow(pool, size)
        # torch's order: oversized blocks first, then all that is free.
        if block is None and self._gave_unsplit_back(pool, size):
            block = grow(pool, size)
        if block is None:
            self.n_retries += 1
            self.empty_cache()
            block = grow(pool, size)
        return block

    def _gave_unsplit_back(self, pool: _Pool, size: int) -> bool:
        """Give back a free block that is never split, or the largest ones; whether that will do."""
        least = self._settings.max_split_bytes
        if least == UNLIMITED_BYTES or self._settings.expandable_segments:
            return False
        wanted, gone = max(size, least), 0
        i = pool.first_of(wanted)
        if i < len(pool.free):
            blocks = [pool.free[i][2]]
        else:
            blocks = [block for size, _, block in reversed(pool.free) if size >= least]
        for block in blocks:
            if gone < wanted:
                gone += block.size
                self._segments.give_back(block)
        return gone >= wanted


def _least_reach(pool: _Pool, i: int) -> int:
    def reach(block: AllocatorBlock) -> int:
        room = block.after
        return block.size + (room.size if room is not None and not room.is_mapped else 0)

    while i + 1 < len(pool.free) and reach(pool.free[i + 1][2]) < reach(pool.free[i][2]):
        i += 1
    return i
