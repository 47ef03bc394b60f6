"""Pinned memory of the host: one planned range a plan, whose parts handles take in turn.

A part is taken again once the copies of its former tenant are over, which the next copy into it
waits for. Where a part is still held, as while a second forward is in flight or a graph is
retained, the whole range is there once more; it stays for the steps that follow.

A range is registered with the driver, and not asked of torch, which rounds up to a power of two.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from remat.graph_capture.errors import TierError, option
from remat.graph_capture.unnamed_files.endings import Ending
from remat.rewriter.tiers.copying import Copy

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices of the process."""


@dataclass
class Uses:
    """What may still read or write a part: events of streams, and copies by threads."""

    events: list[Any] = field(default_factory=list[Any])
    copies: list[Copy] = field(default_factory=list[Copy])

    def settle(self) -> None:
        """Wait for the copies by threads; streams wait for the events."""
        for copy in self.copies:
            copy.settle()
        self.copies.clear()


@dataclass(frozen=True)
class _Taken:
    """The bytes from `start` to `end` of a range, and what uses them."""

    start: int
    end: int
    uses: Uses

    def meets(self, other: _Taken) -> bool:
        """Whether both have a byte."""
        return other.start < self.end and self.start < other.end

    def covers(self, other: _Taken) -> bool:
        """Whether all bytes of the other are its own."""
        return self.start <= other.start and other.end <= self.end


@dataclass(eq=False)
class Part:
    """Some bytes of a range, as long as one handle has them."""

    memory: Tensor
    uses: Uses


class Range:
    """Pinned memory of that size.

    Raises
    ------
    TierError : the system does not have it, or does not pin it.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = max(size_bytes, mmap.PAGESIZE)
        self.memory = pinned(self.size_bytes)
        self.live: list[Ending[_Taken]] = []
        self.former: list[_Taken] = []
        # A handle may die in any thread, and while a part is being taken.
        self.released: deque[Ending[_Taken]] = deque()

    def take(self, start: int, end: int) -> Part | None:
        """The part, with what it has to wait for; None where some of it is held or not there."""
        while self.released:
            gone = self.released.popleft()
            self.live = [one for one in self.live if one is not gone]
            self.former.append(gone.fact)
        wanted = _Taken(start, end, Uses())
        if end > self.size_bytes or any(wanted.meets(one.fact) for one in self.live):
            return None
        for former in filter(wanted.meets, self.former):
            wanted.uses.events += former.uses.events
            wanted.uses.copies += former.uses.copies
        self.former = [one for one in self.former if not wanted.covers(one)]
        part = Part(self.memory[start:end], wanted.uses)
        self.live.append(Ending(part, self.released.append, wanted))
        return part


class PinnedRanges:
    """The ranges of one plan; the first is enough for steps that follow each other."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.ranges: list[Range] = []
        self._taking = threading.Lock()

    def require(self) -> None:
        """Pin the first range, if it is not there yet."""
        with self._taking:
            if not self.ranges:
                self.ranges.append(Range(self.size_bytes))

    def take(self, start: int, size_bytes: int) -> Part:
        """That part of the first range in which it is free."""
        end = start + size_bytes
        with self._taking:
            for one in self.ranges:
                part = one.take(start, end)
                if part is not None:
                    return part
            self.ranges.append(Range(max(self.size_bytes, end)))
            part = self.ranges[-1].take(start, end)
            assert part is not None
            return part


class _Mapping(mmap.mmap):
    """Memory that is given back to the driver before it is given back to the system.

    `weakref.finalize` would be too late: a mapping ends before it tells of its end.
    """

    address = 0
    unregister: Any = None

    def __del__(self) -> None:
        if self.unregister is not None:
            self.unregister(self.address)


def pinned(size_bytes: int) -> Tensor:
    """A uint8 tensor of new pinned memory, which is given back when nothing holds it."""
    try:
        memory = _Mapping(-1, size_bytes)
    except OSError as error:
        raise _refused(size_bytes, str(error)) from error
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    memory.address, runtime = whole.data_ptr(), _runtime()
    status = int(runtime.cudaHostRegister(memory.address, size_bytes, _PORTABLE))
    if status:
        raise _refused(size_bytes, f"cudaHostRegister says {status}")
    memory.unregister = runtime.cudaHostUnregister
    return whole


def _runtime() -> Any:
    return torch.cuda.cudart()


def _refused(size_bytes: int, why: str) -> TierError:
    return TierError(
        f"the host cannot pin {size_bytes} bytes for what this plan copies there ({why}): give a "
        f"smaller {option('host')}, raise the limit on locked memory (ulimit -l), or solve "
        "without offloading"
    )
