"""Files without a name, for values of a running step and for the meter of a folder.

So no exception, no Ctrl-C and no ``kill -9`` leaves one behind (``O_TMPFILE``, Linux). Where there
is no such file, as on a network file system, it is unlinked once it is open. The page cache would
be memory that nobody planned for: files go past it (``O_DIRECT``) if the folder takes that.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import mmap
import os
import platform
import queue
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from remat.graph_capture.errors import FileError, TierError, option

_Fact = TypeVar("_Fact")


class Finalizer(weakref.ref[Any], Generic[_Fact]):
    """Calls `hear`, a method of C, with itself when `thing` has ended; held until then."""

    # Python raises Ctrl-C between two bytecodes and drops what a callback raises, so one in Python
    # may end too early. A method of C queues the fact; another thread or a later call goes on.
    fact: _Fact

    def __new__(cls, thing: Any, hear: Callable[[Any], Any], fact: _Fact) -> Finalizer[_Fact]:
        self = super().__new__(cls, thing, hear)
        self.fact = fact
        return self

    def __init__(self, thing: Any, hear: Callable[[Any], Any], fact: _Fact) -> None:
        super().__init__(thing, hear)  # pyright: ignore[reportCallIssue]  # without the fact


class FileCloser:
    """Closes the descriptor of each object that has ended, in a thread of its own."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[Finalizer[int] | None] = queue.SimpleQueue()
        self._open: dict[int, Finalizer[int]] = {}  # a weak reference that is gone calls nothing
        # Python joins other threads before `atexit` calls `_end`, which ends this one.
        self._thread = threading.Thread(target=self._run, name="remat-closing", daemon=True)
        self._thread.start()

    def watch(self, thing: Any, descriptor: int) -> None:
        ending = Finalizer(thing, self._ended.put, descriptor)
        self._open[id(ending)] = ending

    def end(self) -> None:
        self._ended.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (ending := self._ended.get()) is not None:
            os.close(ending.fact)
            del self._open[id(ending)], ending  # not held while the thread waits for the next one


_file_closers: list[FileCloser] = []
_starting = threading.Lock()


def _file_closer() -> FileCloser:
    with _starting:
        if not _file_closers:
            _file_closers.append(FileCloser())
        return _file_closers[0]


def _end() -> None:
    for one in _file_closers:  # what ends later, in another function of `atexit`, the system closes
        one.end()


def _forget() -> None:
    global _starting  # the fork has its thread in name only, and perhaps a held lock
    _starting = threading.Lock()
    _file_closers.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget)
atexit.register(_end)

BLOCK_BYTES = 4096  # direct reads and writes have multiples of it, and begin at such places
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.ENOSYS)
"""What systems answer that do not know a way of opening or writing."""

_Range = tuple[int, int]  # where it begins, and where it ends, in bytes of the file


class _SharedFile:
    """An open file that many values lie in, closed when nothing holds this object any more."""

    # One for many, as a process may have few files open, often 1,024.
    def __init__(self, descriptor: int, is_direct: bool) -> None:
        self.descriptor, self.is_direct = descriptor, is_direct  # past the page cache
        _file_closer().watch(self, descriptor)
        self.size_bytes, self._gaps = 0, list[_Range]()  # of all ranges, and gaps between
        # That a value has ended a method of C notes; it is looked at when the next range is taken.
        self._ended: queue.SimpleQueue[Finalizer[_Range]] = queue.SimpleQueue()
        self._held: dict[int, Finalizer[_Range]] = {}
        self._taking = threading.Lock()

    def take(self, holder: Any, size_bytes: int) -> int:
        """Where a free range of so many bytes begins; it is free again once `holder` has ended."""
        size_bytes = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        with self._taking:
            while not self._ended.empty():
                ending = self._ended.get()
                del self._held[id(ending)]
                self._give_back(ending.fact)
            gaps = [gap for gap in self._gaps if gap[1] - gap[0] >= size_bytes]
            if not gaps:
                self._grow(size_bytes)
                gaps = self._gaps[-1:] if size_bytes else [(0, 0)]
            start, end = min(gaps, key=lambda gap: gap[1] - gap[0])  # larger ones stay whole
            if size_bytes:
                self._gaps.remove((start, end))
                self._give_back((start + size_bytes, end))
            ending = Finalizer(holder, self._ended.put, (start, start + size_bytes))
            self._held[id(ending)] = ending
        return start

    def _give_back(self, given: _Range) -> None:
        start, end = given
        if start == end:
            return
        # Gaps that touch are one, so that larger ranges fit.
        for gap in [gap for gap in self._gaps if gap[1] == start or gap[0] == end]:
            self._gaps.remove(gap)
            start, end = min(start, gap[0]), max(end, gap[1])
        self._gaps.append((start, end))

    def _grow(self, size_bytes: int) -> None:
        end = self.size_bytes
        more_bytes = size_bytes - sum(b - a for a, b in self._gaps if b == end)
        try:
            if more_bytes:
                os.posix_fallocate(self.descriptor, end, more_bytes)  # a full disk fails here
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        self.size_bytes = end + more_bytes
        self._give_back((end, self.size_bytes))


HOST_FOLDER = "REMAT_OFFLOAD"  # the environment variable that names the folder of a CPU's host tier
CHUNK_BYTES = 4 << 20  # one write or read. On an NVMe disk, larger ones were no faster.
_DIRECT = getattr(os, "O_DIRECT", 0)
_NAMELESS = getattr(os, "O_TMPFILE", 0)
_CALLS = ("posix_fallocate", "preadv", "pwrite", "statvfs")  # Linux has all, macOS not the first

_of_thread = threading.local()


def missing_calls() -> list[str]:
    """The calls that this system lacks: where there are any, no value can be kept in a file."""
    return [name for name in _CALLS if not hasattr(os, name)]


def _require_calls(tier: str) -> None:
    if missing := missing_calls():
        raise TierError(
            f"plan without {tier}: it keeps values in files, which remat does on Linux alone "
            f"({platform.system()} lacks os.{', os.'.join(missing)})"
        )


class Folder:
    """A folder for nameless files, and how it takes them. `TierError`: it takes none."""

    def __init__(self, path: str, tier: str) -> None:
        _require_calls(tier)
        self.path, self.tier = path, tier
        # Whether files never have a name, and whether they go past the page cache.
        self.is_nameless, self.is_direct = bool(_NAMELESS), bool(_DIRECT)
        self._open: Callable[[], _SharedFile | None] = lambda: None
        self._opening = threading.Lock()
        try:
            self._try_ways()
        except OSError as error:
            raise TierError(
                f"values cannot be kept in {path}, the folder of the {tier} tier: "
                f"{error.strerror or error}. {self._way_out}"
            ) from error

    def _try_ways(self) -> None:
        """Take the first way in which a block can be written and read again."""
        ways = [(nameless, direct) for nameless in (True, False) for direct in (True, False)]
        for self.is_nameless, self.is_direct in ways:
            # The system lacks a flag that this way needs.
            if self.is_nameless > bool(_NAMELESS) or self.is_direct > bool(_DIRECT):
                continue
            try:
                file = File(self, BLOCK_BYTES)
                block = memoryview(_bounce()[0])[:BLOCK_BYTES]
                file.write_block(block, 0)
                file.read_block(block, 0)
                return
            except OSError as error:
                is_last = (self.is_nameless, self.is_direct) == ways[-1]
                if is_last or error.errno not in _UNSUPPORTED:
                    raise

    def require_room(self, size_bytes: int) -> None:
        found = os.statvfs(self.path)
        free_bytes = found.f_bavail * found.f_frsize  # as far as users other than root may take it
        if free_bytes < size_bytes:
            raise TierError(
                f"{self.path}, the folder of the {self.tier} tier, has {free_bytes} bytes free, "
                f"and the plan keeps up to {size_bytes} there. {self._way_out}"
            )

    @property
    def _way_out(self) -> str:
        is_nvme = self.tier == "nvme"
        where = f"give {option('nvme')} another folder" if is_nvme else f"set {HOST_FOLDER}"
        return f"Make room or {where}, or solve without offloading"

    def file(self) -> _SharedFile:
        """The file that values are in now: the one that is open, or a new one."""
        with self._opening:
            found = self._open()
            if found is None or found.is_direct != self.is_direct:  # only while ways are tried
                found = _SharedFile(self._new(), self.is_direct)
                self._open = weakref.ref(found)  # closed with its last value
            return found

    def _new(self) -> int:
        flags = os.O_RDWR | (_DIRECT if self.is_direct else 0)
        if self.is_nameless:
            return os.open(self.path, flags | _NAMELESS, 0o600)
        descriptor, name = tempfile.mkstemp(prefix="remat-", dir=self.path)
        try:
            if not self.is_direct:
                return descriptor
            with os.fdopen(descriptor):  # opened again, as `mkstemp` takes no flags
                return os.open(name, flags)
        finally:
            os.unlink(name)


class File:
    """The bytes of one value, in a file of a folder, while anything holds this object."""

    def __init__(self, folder: Folder, size_bytes: int) -> None:
        self.shared, self.size_bytes = folder.file(), size_bytes
        self.is_direct, self.descriptor = self.shared.is_direct, self.shared.descriptor
        self.start = self.shared.take(self, size_bytes)

    def write_from(self, address: int) -> None:
        for start, block, in_memory in self._blocks(address):
            if in_memory:
                ctypes.memmove(in_memory, address + start, min(len(block), self.left(start)))
            self.write_block(block, start)

    def read_to(self, address: int) -> None:
        for start, block, in_memory in self._blocks(address):
            self.read_block(block, start)
            if in_memory:
                ctypes.memmove(address + start, in_memory, min(len(block), self.left(start)))

    def copy_to(self, other: File) -> None:
        buffer = memoryview(_bounce()[0])
        for start in range(0, self.size_bytes, CHUNK_BYTES):
            size_bytes = min(CHUNK_BYTES, self.left(start))
            self.read_block(buffer[: self.moved_bytes(size_bytes)], start)
            other.write_block(buffer[: other.moved_bytes(size_bytes)], start)

    def moved_bytes(self, size_bytes: int) -> int:
        """What is written or read for so many bytes: whole blocks past the page cache."""
        return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES if self.is_direct else size_bytes

    def left(self, start: int) -> int:
        return self.size_bytes - start

    def _blocks(self, address: int) -> Iterator[tuple[int, memoryview, int]]:
        """Parts of the file: start, what is written or read, and its address; 0 where memory is
        used as it is. Else it goes through the thread's aligned buffer, as a direct write wants."""
        bounce, aligned = _bounce()
        for start in range(0, self.size_bytes, CHUNK_BYTES):
            size_bytes = min(CHUNK_BYTES, self.left(start))
            fits = address % BLOCK_BYTES == 0 and size_bytes % BLOCK_BYTES == 0
            if self.is_direct and not fits:
                yield start, memoryview(bounce)[: self.moved_bytes(size_bytes)], aligned
            else:
                memory: Any = (ctypes.c_char * size_bytes).from_address(address + start)
                yield start, memoryview(memory).cast("B"), 0

    def write_block(self, block: memoryview, start: int) -> None:
        """The system may take a part at a time."""
        while block:
            done = os.pwrite(self.descriptor, block, self.start + start)
            block, start = block[done:], start + done

    def read_block(self, block: memoryview, start: int) -> None:
        while block:
            if (done := os.preadv(self.descriptor, [block], self.start + start)) == 0:
                raise OSError(errno.EIO, "a file of values is shorter than what was written")
            block, start = block[done:], start + done


def _bounce() -> tuple[mmap.mmap, int]:
    """This thread's buffer, aligned to a page, and its address."""
    if not hasattr(_of_thread, "buffer"):
        buffer = mmap.mmap(-1, CHUNK_BYTES)
        _of_thread.buffer = buffer, ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return _of_thread.buffer


def host_folder() -> str:
    return os.environ.get(HOST_FOLDER) or tempfile.gettempdir()  # the host tier of plans for a CPU


def require_writable(folder: str, tier: str = "host") -> None:
    _require_calls(tier)
    if not Path(folder).is_dir():
        raise FileError(f"{folder} is no folder: name one on the drive that is to be used")
    try:
        Folder(folder, tier)
    except TierError as error:
        why = getattr(error.__cause__, "strerror", None) or error.__cause__
        raise FileError(f"{folder} cannot be written ({why}): name a folder of your own") from error


def free_on_drive_bytes(folder: str) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise FileError(
            f"{folder} is no folder ({error.strerror}): name one on the drive that is to be used"
        ) from error
