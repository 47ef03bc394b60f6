"""Below a CUDA device: pinned memory of the host over two streams, and files for NVMe.

Where a value is freed, the computing stream waits for its copy, so the stream's order makes reuse
safe; `record_stream` would defer it, and peaks would vary. A copy back takes its memory from the
computing stream. Queueing one from NVMe waits until its bytes are on the host.
"""

from __future__ import annotations

import functools
import mmap
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat.graph_capture.devices.pinned_memory import pinned
from remat.graph_capture.errors import TierError, option
from remat.graph_capture.graph import Links
from remat.graph_capture.spill_files import File, Finalizer, Folder, host_folder
from remat.rewriter.tiers.file_tier import (
    FileOf,
    HostPlaces,
    PendingCopy,
    StorageView,
    Store,
    all_bytes,
    handle_of,
    link_thread,
    store_of,
)


@dataclass
class _Uses:
    """What may still read or write a part: events of streams, and copies by threads."""

    events: list[Any] = field(default_factory=list[Any])
    copies: list[PendingCopy] = field(default_factory=list[PendingCopy])

    def settle(self) -> None:
        for copy in self.copies:  # streams wait for the events
            copy.settle()
        self.copies.clear()


class _Taken(NamedTuple):
    start: int
    end: int
    uses: _Uses

    def meets(self, other: _Taken) -> bool:
        return other.start < self.end and self.start < other.end

    def covers(self, other: _Taken) -> bool:
        return self.start <= other.start and other.end <= self.end


@dataclass(eq=False)
class _Part:
    memory: Tensor
    uses: _Uses


class _Range:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = max(size_bytes, mmap.PAGESIZE)
        self.memory = pinned(self.size_bytes)
        self.live: list[Finalizer[_Taken]] = []
        self.former: list[_Taken] = []
        self.released: deque[Finalizer[_Taken]] = deque()  # handles die in any thread, at any time

    def take(self, start: int, end: int) -> _Part | None:
        """The part, with what it has to wait for; None where some of it is held or not there."""
        while self.released:
            gone = self.released.popleft()
            self.live = [one for one in self.live if one is not gone]
            self.former.append(gone.fact)
        wanted = _Taken(start, end, _Uses())
        if end > self.size_bytes or any(wanted.meets(one.fact) for one in self.live):
            return None
        for former in filter(wanted.meets, self.former):  # former tenants' copies come first
            wanted.uses.events += former.uses.events
            wanted.uses.copies += former.uses.copies
        self.former = [one for one in self.former if not wanted.covers(one)]
        part = _Part(self.memory[start:end], wanted.uses)
        self.live.append(Finalizer(part, self.released.append, wanted))
        return part


class _PinnedRanges:
    """The ranges of one plan, whose parts handles take in turn; mostly one is enough."""

    def __init__(self, size_bytes: int, host_bytes: int) -> None:
        self.size_bytes, self.host_bytes = size_bytes, host_bytes
        self.ranges: list[_Range] = []
        self._taking = threading.Lock()

    def require(self) -> None:
        with self._taking:
            if not self.ranges:
                self.ranges.append(_Range(self.size_bytes))

    def take(self, start: int, size_bytes: int) -> _Part:
        end = start + size_bytes
        with self._taking:
            for one in self.ranges:
                if (part := one.take(start, end)) is not None:
                    return part
            # Still held, as by a second forward: the range is there once more, and stays.
            self._require_room()
            self.ranges.append(_Range(max(self.size_bytes, end)))
            part = self.ranges[-1].take(start, end)
            assert part is not None
            return part

    def _require_room(self) -> None:
        size_bytes = (len(self.ranges) + 1) * self.size_bytes
        if self.ranges and size_bytes > self.host_bytes:
            raise TierError(
                f"call backward before the next forward, or plan with a larger {option('host')}: "
                f"{len(self.ranges) + 1} forwards in flight copy {size_bytes} bytes to the host, "
                f"and the plan is for {self.host_bytes}"
            )


@dataclass(eq=False)
class _PinnedCopy:
    """A value in pinned memory: there once `copied` is passed, or `read` has ended."""

    part: _Part
    copied: Any = None
    read: PendingCopy | None = None


class Arriving:
    def __init__(self, x: Tensor, copied: Any, computing: Any) -> None:
        self.x, self.copied, self.computing = x, copied, computing

    def __del__(self) -> None:
        if self.copied is not None:  # not yet arrived, as in a failed backward
            self.computing.wait_event(self.copied)


class StreamTier:
    """The tiers of one plan for a CUDA device; `TierError` if the places exceed the host's room."""

    def __init__(self, device: str, places: HostPlaces, links: Links, nvme_bytes: int) -> None:
        if places.size_bytes > links.host_bytes:
            raise TierError(
                f"plan with a smaller {option('host')} and train with this one: with gaps, the "
                f"values that this plan copies to the host take {places.size_bytes} bytes of "
                f"pinned memory, and the host has room for {links.host_bytes}"
            )
        self.places, self.device = places, torch.device(device)
        self._ranges = _PinnedRanges(places.size_bytes, links.host_bytes)
        self._nvme_bytes = nvme_bytes
        self._nvme = Folder(links.nvme_path or host_folder(), "nvme") if nvme_bytes else None

    def require_room(self) -> None:
        self._ranges.require()  # before the first step: pinning takes time, and may fail
        if self._nvme is not None:
            self._nvme.require_room(self._nvme_bytes)

    def offload(self, x: Tensor, place_bytes: int) -> Tensor:
        shown = StorageView.of(x)
        if x.device != self.device:  # it is on the host in any case, as random states are
            return handle_of(Store(shown, x))
        part = self._ranges.take(place_bytes, shown.size_bytes)
        part.uses.settle()
        way = side_stream(str(self.device), "d2h")
        way.wait_event(self._computing().record_event())  # its work makes the value
        copied = self._queued(way, part.uses, part.memory, all_bytes(x.untyped_storage()))
        part.uses.events[:] = [copied]
        return handle_of(Store(shown, _PinnedCopy(part, copied)))

    def leave(self, handle: Tensor, x: Tensor) -> Tensor:
        kept = store_of(handle).kept
        if isinstance(kept, _PinnedCopy) and kept.copied is not None:
            self._computing().wait_event(kept.copied)  # only then may the block be given away
        return handle

    def fetch(self, handle: Tensor) -> Arriving:
        store = store_of(handle)
        if isinstance(store.kept, Tensor):
            return Arriving(store.kept, None, None)
        kept: _PinnedCopy = store.kept
        if kept.read is not None:
            kept.read.wait()  # the copy can be queued only once the bytes are on the host
        whole = compute_memory(store.shown.size_bytes, self.device)
        computing, way = self._computing(), side_stream(str(self.device), "h2d")
        way.wait_event(computing.record_event())  # the block's former tensor may still be read
        source = _Uses() if kept.copied is None else _Uses([kept.copied])
        copied = self._queued(way, source, whole, kept.part.memory)
        kept.part.uses.events.append(copied)  # the next tenant must not write before this read
        return Arriving(store.shown.over(whole), copied, computing)

    def arrive(self, pending: Arriving) -> Tensor:
        if pending.copied is not None:
            self._computing().wait_event(pending.copied)
            pending.copied = None
        return pending.x

    def write(self, handle: Tensor) -> Tensor:
        store = store_of(handle)
        if isinstance(store.kept, Tensor):
            return handle
        source: _PinnedCopy = store.kept
        kept = FileOf()
        given = [self._nvme, kept, source.part.memory, source.copied]
        kept.copied = link_thread("write").begin(_write_file, given, source.read)
        source.part.uses.copies.append(kept.copied)
        return handle_of(Store(store.shown, kept))

    def read(self, handle: Tensor, place_bytes: int) -> Tensor:
        store = store_of(handle)
        if isinstance(store.kept, Tensor):
            return handle
        kept: FileOf = store.kept
        part = self._ranges.take(place_bytes, store.shown.size_bytes)
        before = _Uses(list(part.uses.events), list(part.uses.copies))
        read = link_thread("read").begin(_read_file, [kept, part.memory, before], kept.copied)
        part.uses.copies.append(read)
        return handle_of(Store(store.shown, _PinnedCopy(part, read=read)))

    def _computing(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def _queued(self, way: Any, after: _Uses, target: Tensor, source: Tensor) -> Any:
        for event in after.events:
            way.wait_event(event)
        queue_copy(way, target, source)
        return way.record_event()


def share_memory(tiers: Sequence[Any]) -> None:
    """Let plans of which one runs at a time take turns in the pinned memory of the largest."""
    ranges = max((one._ranges for one in tiers), key=lambda one: one.size_bytes)
    for one in tiers:
        one._ranges = ranges


@functools.cache
def side_stream(device: str, link: str) -> Any:
    return torch.cuda.Stream(device)  # all plans of a process share it, as they do the link


def compute_memory(size_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def queue_copy(way: Any, target: Tensor, source: Tensor) -> None:
    with torch.cuda.stream(way):
        target.copy_(source, non_blocking=True)


def _write_file(folder: Folder, kept: FileOf, memory: Tensor, copied: Any) -> None:
    if copied is not None:
        copied.synchronize()
    file = File(folder, memory.nbytes)
    file.write_from(memory.data_ptr())
    kept.file = file


def _read_file(kept: FileOf, memory: Tensor, before: _Uses) -> None:
    assert kept.file is not None
    for event in before.events:
        event.synchronize()  # a thread writes this memory, so the host waits itself
    before.settle()
    kept.file.read_to(memory.data_ptr())
