"""Where blocks come from: segments of a fixed size, or expandable ones that grow by pages.

Both answer `grow` and `give_back`. Expandable segments are those of
``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``: a range of addresses for each pool, a little
longer than the device is large, into which pages of memory are mapped where they are needed.
"""

from __future__ import annotations

from typing import Protocol

from remat.schedules.allocator.blocks import Block, Device, Pool
from remat.schedules.allocator.settings import (
    SEGMENT_MULTIPLE_BYTES,
    AllocatorSettings,
    multiple_above,
)


class Segments(Protocol):
    """Takes memory from the device and gives it back."""

    def grow(self, pool: Pool, size: int) -> Block | None:
        """A block of at least `size` in no pool; None where the device has no room for it."""
        ...

    def give_back(self, block: Block) -> None:
        """Give to the device what can be given of a block that is free in its pool."""
        ...


class FixedSegments:
    """Each segment is one allocation; it is given back as a whole."""

    def __init__(self, settings: AllocatorSettings, device: Device) -> None:
        self._settings, self._device = settings, device

    def grow(self, pool: Pool, size: int) -> Block | None:
        """A new segment as one block."""
        segment = self._settings.segment_bytes(size)
        if not self._device.take(segment):
            return None
        return Block(segment, self._device.addresses(segment, SEGMENT_MULTIPLE_BYTES), pool)

    def give_back(self, block: Block) -> None:
        """The whole segment, if nothing else lies in it."""
        if block.is_whole_segment:
            block.pool.drop(block)
            self._device.give_back(block.size)


class ExpandableSegments:
    """Each segment is a range of addresses; pages of it are mapped and unmapped."""

    def __init__(self, settings: AllocatorSettings, device: Device) -> None:
        self._settings, self._device = settings, device

    def grow(self, pool: Pool, size: int) -> Block | None:
        """Map pages behind the last free block of a range with enough room.

        Pages that were mapped stay mapped, and their block free, where a later one finds no memory.
        """
        first = self._room(pool, size)
        block = first if first.is_mapped else self._map(first, min(first.size, size))
        while block is not None and block.size < size:
            room = block.after
            assert room is not None  # `_room` has made sure of it
            block = self._map(room, min(size - block.size, room.size))
        if block is not None:
            pool.drop(block)
        return block

    def give_back(self, block: Block) -> None:
        """The pages that lie in it as a whole."""
        page = self._settings.page_bytes(block.pool.is_small)
        end = block.address + block.size
        low, high = multiple_above(block.address, page), end // page * page
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

    def _room(self, pool: Pool, size: int) -> Block:
        """The first of neighbours that are free or unmapped and have `size` together."""
        for _, room in pool.unmapped:
            first = room if room.before is None or room.before.is_used else room.before
            if _reaches(first, size):
                return first
        return self._new_range(pool)

    def _new_range(self, pool: Pool) -> Block:
        """One more expandable segment, with nothing mapped: 9/8 of the device, as in torch."""
        page = self._settings.page_bytes(pool.is_small)
        length = multiple_above(self._device.capacity + self._device.capacity // 8, page)
        room = Block(length, self._device.addresses(length, page), pool, is_mapped=False)
        pool.add(room)
        return room

    def _map(self, room: Block, size: int) -> Block | None:
        """Give memory to the first pages of `room`; the free block that they are part of then."""
        page = self._settings.page_bytes(room.pool.is_small)
        mapped = min(multiple_above(size, page), room.size)
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


def _reaches(first: Block, size: int) -> bool:
    """Whether neighbours that are not used, from `first` on, have `size` together."""
    found, block = 0, first
    while found < size and not block.is_used:
        found += block.size
        if block.after is None:
            break
        block = block.after
    return found >= size
