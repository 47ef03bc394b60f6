"""What a graph asks of the memory below its device; below a CPU: files, for the host and NVMe.

A CPU's "host" tier is a file in `REMAT_OFFLOAD` or the temporary folder; NVMe's is in the links'
folder. The thread that fills a range takes it, where Ctrl-C is never heard.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, UntypedStorage

from remat.graph_capture.errors import TierError
from remat.graph_capture.graph import Tier as TierName
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.spill_files import File, Finalizer, Folder, host_folder
from remat.schedules.schedule import Fetch, Free, Offload, Schedule

# A handle is a tensor of 8 bytes over a `Store`, which nothing else keeps alive. When the last
# graph, autograd node or copy lets go of it, what is below goes too.

HANDLE_BYTES = 8


@dataclass(frozen=True)
class StorageView:
    """How a tensor shows its storage, of which all bytes are copied."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    size_bytes: int

    @classmethod
    def of(cls, x: Tensor) -> Self:
        return cls(
            tuple(x.size()), tuple(x.stride()), int(x.storage_offset()), x.dtype,
            x.untyped_storage().nbytes(),
        )  # fmt: skip

    def over(self, whole: Tensor) -> Tensor:
        x = torch.empty(0, dtype=self.dtype, device=whole.device)
        return x.set_(whole.untyped_storage(), self.offset, self.size, self.stride)


def all_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Store(bytearray):
    def __init__(self, shown: StorageView, kept: Any) -> None:
        super().__init__(HANDLE_BYTES)
        self.shown, self.kept = shown, kept


_stores: dict[int, Finalizer[int]] = {}  # by the address of a handle's memory, its own for life
_ended: deque[Finalizer[int]] = deque()


def handle_of(store: Store) -> Tensor:
    while _ended:
        gone = _ended.popleft()
        if _stores.get(gone.fact) is gone:  # else another has the address by now
            del _stores[gone.fact]
    handle = torch.frombuffer(store, dtype=torch.uint8)  # shares and keeps the store's memory alive
    address = handle.untyped_storage().data_ptr()
    _stores[address] = Finalizer(store, _ended.append, address)
    return handle


def store_of(handle: Tensor) -> Store:
    store = _stores[handle.untyped_storage().data_ptr()]()
    assert isinstance(store, Store)
    return store


PAGE_BYTES = 4096


@dataclass(frozen=True)
class HostPlaces:
    """Offsets by the index of the step that begins a stay, and the range; empty without a range."""

    offsets_bytes: dict[int, int] = field(default_factory=dict[int, int])
    size_bytes: int = 0

    def of_step(self, index: int) -> int:
        return self.offsets_bytes.get(index, 0)


class _Stay(NamedTuple):
    start: int
    end: int
    size_bytes: int


def host_places(graph: TrainingGraph, schedule: Schedule) -> HostPlaces:
    """Places in one range of pinned memory for all stays, from the copy in to the drop."""
    stays = _stays(graph, schedule)
    placed: list[tuple[_Stay, int]] = []
    # Large ones first, each as low as it can (Pisarchyk and Lee, 2020, arXiv 2001.03288).
    for stay in sorted(stays, key=lambda one: (-one.size_bytes, one.start)):
        placed.append((stay, _lowest(stay, placed)))
    size_bytes = max((offset + stay.size_bytes for stay, offset in placed), default=0)
    return HostPlaces({stay.start: offset for stay, offset in placed}, size_bytes)


def _stays(graph: TrainingGraph, schedule: Schedule) -> list[_Stay]:
    begun: dict[str, int] = {}
    stays: list[_Stay] = []

    def end(value: str, at: int) -> None:
        whole_bytes = -(-graph.value_by_name[value].size_bytes // PAGE_BYTES) * PAGE_BYTES
        stays.append(_Stay(begun.pop(value), at, whole_bytes))

    for i, step in enumerate(schedule.steps):
        if isinstance(step, Offload | Fetch) and step.to == "host":
            begun[step.value] = i
        elif isinstance(step, Free) and step.at == "host":
            end(step.value, i)
    for value in list(begun):
        end(value, len(schedule.steps))
    return stays


def _lowest(stay: _Stay, placed: list[tuple[_Stay, int]]) -> int:
    """The lowest offset at which `stay` shares no byte with one that it shares time with."""
    offset = 0
    beside = [(o, one) for one, o in placed if one.start < stay.end and stay.start < one.end]
    for low, one in sorted(beside, key=lambda pair: pair[0]):
        if offset + stay.size_bytes <= low:
            break
        offset = max(offset, low + one.size_bytes)
    return offset


class TierCopies(Protocol):
    """Copies of values below one device. Each function is called by a node of a graph."""

    places: HostPlaces  # of each stay on the host, if that is one planned range

    def require_room(self) -> None:
        """Raise `TierError` if a step that begins now would not have the room that it needs."""

    # Begins to copy all of the storage of `x` to the host; its handle.
    def offload(self, x: Tensor, place_bytes: int) -> Tensor: ...
    # Lets `x` go only once it is copied; the same handle.
    def leave(self, handle: Tensor, x: Tensor) -> Tensor: ...
    # Takes memory on the device, and begins to copy into it; what `arrive` takes.
    def fetch(self, handle: Tensor) -> Any: ...
    # The tensor that was fetched, as it was.
    def arrive(self, pending: Any) -> Tensor: ...
    # Begins to copy from the host to NVMe; a handle of the copy there.
    def write(self, handle: Tensor) -> Tensor: ...
    # Begins to copy from NVMe to the host; a handle of the copy there.
    def read(self, handle: Tensor, place_bytes: int) -> Tensor: ...


_Work = Callable[..., None]


class PendingCopy:
    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            # An error of its own: the thread's frames hold these handles in a circle.
            raise TierError(
                f"a value could not be copied between tiers of memory: {self._error}. Nothing of "
                "this step is kept; the module can keep training"
            ) from self._error

    def settle(self) -> None:
        self._ended.wait()

    def carry_out(self, work: _Work, given: list[Any], after: PendingCopy | None) -> None:
        try:
            if after is not None:
                after.wait()
            work(*given)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it where the step runs
            cause = error.__cause__ or error
            self._error = cause.with_traceback(None)
            cause.__context__ = None
        finally:
            given.clear()  # a late free would escape the profiler
            self._ended.set()

    def drop(self, given: list[Any]) -> None:
        self._error = InterruptedError("the process ends")
        given.clear()
        self._ended.set()


_Begun = tuple[PendingCopy, _Work, list[Any], PendingCopy | None]


class LinkThread:
    """The thread of one link, which carries out copies in the order in which they begin."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Begun | None] = queue.SimpleQueue()
        self._is_ending = False
        # A thread that is no daemon keeps a process alive.
        self._thread = threading.Thread(target=self._run, name=f"remat-{name}", daemon=True)
        self._thread.start()

    def begin(self, work: _Work, given: list[Any], after: PendingCopy | None = None) -> PendingCopy:
        """Begin ``work(*given)`` after all earlier copies of the link, and `after`."""
        copy = PendingCopy()
        self._queue.put((copy, work, given, after))
        return copy

    def end(self) -> None:
        self._is_ending = True
        self._queue.put(None)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while (begun := self._queue.get()) is not None:
            copy, work, given, after = begun
            if self._is_ending:
                copy.drop(given)
            else:
                copy.carry_out(work, given, after)
            del begun, copy, work, given, after  # an idle thread holds nothing


_threads: dict[str, LinkThread] = {}
_starting = threading.Lock()


def link_thread(name: str) -> LinkThread:
    with _starting:  # all plans of a process share a thread, as they do the link
        if name not in _threads:
            _threads[name] = LinkThread(name)
        return _threads[name]


def _end_threads() -> None:
    threads = list(_threads.values())
    _threads.clear()  # a copy begun by a later function of atexit gets a new one
    for one in threads:
        one.end()
    for one in threads:
        one.join()


def _forget_threads() -> None:
    global _starting  # a forked process has no threads, and the lock may be held
    _starting = threading.Lock()
    _threads.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_threads)
atexit.register(_end_threads)  # ending a daemon within torch's C++ would abort

_Pending = tuple[Tensor, PendingCopy]


@dataclass(eq=False)
class FileOf:
    """The file of one handle, once the copy into it has taken its range."""

    copied: PendingCopy = field(init=False)
    file: File | None = None


class FileTier:
    """The tiers of one plan for a CPU; without `nvme_path`, NVMe is in the host tier's folder."""

    def __init__(self, host_bytes: int, nvme_bytes: int, nvme_path: str) -> None:
        self.places = HostPlaces()
        self._host = Folder(host_folder(), "host")
        self._nvme = Folder(nvme_path, "nvme") if nvme_path and nvme_bytes else self._host
        self._needs = [(self._host, host_bytes), (self._nvme, nvme_bytes)]
        if self._nvme is self._host:  # one folder needs room for both
            self._needs = [(self._host, host_bytes + nvme_bytes)]
        self.folders: dict[TierName, Folder] = {"host": self._host, "nvme": self._nvme}

    def require_room(self) -> None:
        for folder, size_bytes in self._needs:  # what other steps take meanwhile is not known
            folder.require_room(size_bytes)

    def offload(self, x: Tensor, place_bytes: int) -> Tensor:
        shown, kept = StorageView.of(x), FileOf()
        kept.copied = link_thread("d2h").begin(_fill_from_memory, [self._host, kept, x, shown])
        return handle_of(Store(shown, kept))

    def leave(self, handle: Tensor, x: Tensor) -> Tensor:
        store_of(handle).kept.copied.wait()
        return handle

    def fetch(self, handle: Tensor) -> _Pending:
        store = store_of(handle)
        whole = torch.empty(store.shown.size_bytes, dtype=torch.uint8)
        kept: FileOf = store.kept
        copy = link_thread("h2d").begin(_fill_memory, [kept, whole], kept.copied)
        return store.shown.over(whole), copy

    def arrive(self, pending: _Pending) -> Tensor:
        x, copy = pending
        copy.wait()
        return x

    def write(self, handle: Tensor) -> Tensor:
        return self._to_folder(handle, self._nvme, "write")

    def read(self, handle: Tensor, place_bytes: int) -> Tensor:
        return self._to_folder(handle, self._host, "read")

    def _to_folder(self, handle: Tensor, folder: Folder, link: str) -> Tensor:
        store, kept = store_of(handle), FileOf()
        source: FileOf = store.kept
        kept.copied = link_thread(link).begin(_fill_file, [folder, kept, source], source.copied)
        return handle_of(Store(store.shown, kept))


def _fill_from_memory(folder: Folder, kept: FileOf, x: Tensor, shown: StorageView) -> None:
    file = File(folder, shown.size_bytes)
    file.write_from(x.untyped_storage().data_ptr())
    kept.file = file


def _fill_memory(kept: FileOf, whole: Tensor) -> None:
    assert kept.file is not None
    kept.file.read_to(whole.untyped_storage().data_ptr())


def _fill_file(folder: Folder, kept: FileOf, source: FileOf) -> None:
    assert source.file is not None
    file = File(folder, source.file.size_bytes)
    source.file.copy_to(file)
    kept.file = file
