"""Blocks of memory, the pools of free ones, and the device that they are taken from."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from remat.schedules.allocator.settings import multiple_above


@dataclass(eq=False)
class Block:
    """A range of addresses in one segment; `before` and `after` are its neighbours there.

    A block that is not mapped is room in an expandable segment: addresses without memory.
    """

    size: int
    address: int
    pool: Pool
    is_used: bool = False
    is_mapped: bool = True
    before: Block | None = None
    after: Block | None = None

    @property
    def is_whole_segment(self) -> bool:
        """Whether nothing else lies in its segment."""
        return self.before is None and self.after is None

    def put_between(self, before: Block | None, after: Block | None) -> Block:
        """Itself, as the neighbour of these two."""
        self.before, self.after = before, after
        if before is not None:
            before.after = self
        if after is not None:
            after.before = self
        return self

    def cut_off(self, size: int) -> Block:
        """The first `size` bytes, as a block of their own; the rest stays with this one."""
        first = Block(size, self.address, self.pool, is_mapped=self.is_mapped)
        first.put_between(self.before, self)
        self.address += size
        self.size -= size
        return first

    def join(self) -> None:
        """Take in both neighbours, where they are free and mapped as this one is."""
        for other in (self.before, self.after):
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
class Pool:
    """Free blocks by size, then address; and unmapped ones by address."""

    is_small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list[tuple[int, int, Block]])
    unmapped: list[tuple[int, Block]] = field(default_factory=list[tuple[int, Block]])

    def add(self, block: Block) -> None:
        """Put in a block that is free, or unmapped."""
        if block.is_mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def drop(self, block: Block) -> None:
        """Take out a block that is in it."""
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def first_of(self, size: int) -> int:
        """Index of the smallest free block of at least `size`; of the end if there is none."""
        return bisect_left(self.free, (size, 0))


@dataclass
class Device:
    """Memory of a device: how much there is, what is taken, and the most that was."""

    capacity: int
    reserved: int = 0
    peak_reserved: int = 0
    next_address: int = 1 << 40

    def take(self, size: int) -> bool:
        """Take memory, if there is enough."""
        if self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def give_back(self, size: int) -> None:
        """Memory that is no longer taken."""
        self.reserved -= size

    def addresses(self, size: int, unit: int) -> int:
        """Where a new range begins, at a multiple of `unit`; it touches no other range."""
        address = multiple_above(self.next_address, unit)
        self.next_address = address + size + unit
        return address
