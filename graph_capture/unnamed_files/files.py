"""Files without a name, for values of a running step and for the meter of a folder.

A file is opened without a name (``O_TMPFILE``, Linux), so no exception, no Ctrl-C and no
``kill -9`` leaves one behind. Where a folder has no such files, as on a network file system, a file
is unlinked right after it is opened. It is written and read past the page cache (``O_DIRECT``) if
the folder takes that, as the cache would be memory that nobody planned for; else through it. The
values of a step share one.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from remat.graph_capture.errors import TierError, option
from remat.graph_capture.unnamed_files.shared_file import BLOCK_BYTES, UNSUPPORTED, SharedFile

HOST_FOLDER = "REMAT_OFFLOAD"
"""The environment variable that names the folder of a CPU's host tier."""
CHUNK_BYTES = 4 << 20
"""One write or read. On an NVMe disk, larger ones were no faster."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_NAMELESS = getattr(os, "O_TMPFILE", 0)
_CALLS = ("posix_fallocate", "preadv", "pwrite", "statvfs")
"""What all of this is done by. Linux has them; Windows has none, and macOS not the first."""

_of_thread = threading.local()


def missing_calls() -> list[str]:
    """The calls that this system lacks: where there are any, no value can be kept in a file."""
    return [name for name in _CALLS if not hasattr(os, name)]


def require_calls(tier: str) -> None:
    """Raise `TierError` on a system that cannot keep values in files."""
    if missing := missing_calls():
        raise TierError(
            f"plan without {tier}: it keeps values in files, which remat does on Linux alone "
            f"({platform.system()} lacks os.{', os.'.join(missing)})"
        )


class Folder:
    """A folder for nameless files, and the way in which it takes them.

    Attributes
    ----------
    path : of the folder. is_direct : whether its files go past the page cache.
    is_nameless : whether they never have a name.

    Raises
    ------
    TierError : no file can be made there, or the system has no such files.
    """

    def __init__(self, path: str, tier: str) -> None:
        require_calls(tier)
        self.path, self.tier = path, tier
        self.is_nameless, self.is_direct = bool(_NAMELESS), bool(_DIRECT)
        self._open: Callable[[], SharedFile | None] = lambda: None
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
            if self.is_nameless > bool(_NAMELESS) or self.is_direct > bool(_DIRECT):
                continue
            try:
                self._try_block()
                return
            except OSError as error:
                is_last = (self.is_nameless, self.is_direct) == ways[-1]
                if is_last or error.errno not in UNSUPPORTED:
                    raise

    def _try_block(self) -> None:
        file, block = File(self, BLOCK_BYTES), memoryview(_bounce()[0])[:BLOCK_BYTES]
        file.write_block(block, 0)
        file.read_block(block, 0)

    def require_room(self, size_bytes: int) -> None:
        """Raise `TierError` if the file system has less than `size_bytes` free."""
        found = os.statvfs(self.path)
        free_bytes = found.f_bavail * found.f_frsize
        if free_bytes < size_bytes:
            raise TierError(
                f"{self.path}, the folder of the {self.tier} tier, has {free_bytes} bytes free, "
                f"and the plan keeps up to {size_bytes} there. {self._way_out}"
            )

    @property
    def _way_out(self) -> str:
        where = (
            f"give {option('nvme')} another folder" if self.tier == "nvme" else f"set {HOST_FOLDER}"
        )
        return f"Make room or {where}, or solve without offloading"

    def file(self) -> SharedFile:
        """The file that values are in now: the one that is open, or a new one."""
        with self._opening:
            found = self._open()
            if found is None or found.is_direct != self.is_direct:
                found = SharedFile(self._new(), self.is_direct)
                self._open = weakref.ref(found)
            return found

    def _new(self) -> int:
        """A new file's descriptor."""
        flags = os.O_RDWR | (_DIRECT if self.is_direct else 0)
        if self.is_nameless:
            return os.open(self.path, flags | _NAMELESS, 0o600)
        descriptor, name = tempfile.mkstemp(prefix="remat-", dir=self.path)
        try:
            if not self.is_direct:
                return descriptor
            try:
                return os.open(name, flags)
            finally:
                os.close(descriptor)
        finally:
            os.unlink(name)


class File:
    """The bytes of one value, in a file of a folder, while anything holds this object.

    Raises
    ------
    OSError : no file can be opened, or the disk has no room for all of it.
    """

    def __init__(self, folder: Folder, size_bytes: int) -> None:
        self.shared, self.size_bytes = folder.file(), size_bytes
        self.is_direct, self.descriptor = self.shared.is_direct, self.shared.descriptor
        self.start = self.shared.take(self, size_bytes)

    def write_from(self, address: int) -> None:
        """Fill the file from memory."""
        for start, block, in_memory in self._blocks(address):
            if in_memory:
                ctypes.memmove(in_memory, address + start, min(len(block), self.left(start)))
            self.write_block(block, start)

    def read_to(self, address: int) -> None:
        """Fill memory from the file."""
        for start, block, in_memory in self._blocks(address):
            self.read_block(block, start)
            if in_memory:
                ctypes.memmove(address + start, in_memory, min(len(block), self.left(start)))

    def copy_to(self, other: File) -> None:
        """Fill another file from this one."""
        buffer = memoryview(_bounce()[0])
        for start in range(0, self.size_bytes, CHUNK_BYTES):
            size_bytes = min(CHUNK_BYTES, self.left(start))
            self.read_block(buffer[: self.moved_bytes(size_bytes)], start)
            other.write_block(buffer[: other.moved_bytes(size_bytes)], start)

    def moved_bytes(self, size_bytes: int) -> int:
        """What is written or read for so many bytes: whole blocks past the page cache."""
        return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES if self.is_direct else size_bytes

    def left(self, start: int) -> int:
        """Bytes from `start` to the end."""
        return self.size_bytes - start

    def _blocks(self, address: int) -> Iterator[tuple[int, memoryview, int]]:
        """Parts of the file: where each starts, what is written or read, and its address.

        Memory goes through this thread's aligned buffer where it does not lie as a direct write
        wants it; the address is 0 where it is used as it is.
        """
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
        """Write all of `block`; the system may take a part at a time."""
        while block:
            done = os.pwrite(self.descriptor, block, self.start + start)
            block, start = block[done:], start + done

    def read_block(self, block: memoryview, start: int) -> None:
        """Read until `block` is full."""
        while block:
            done = os.preadv(self.descriptor, [block], self.start + start)
            if done == 0:
                raise OSError(errno.EIO, "a file of values is shorter than what was written")
            block, start = block[done:], start + done


def _bounce() -> tuple[mmap.mmap, int]:
    """This thread's buffer, aligned to a page, and its address."""
    if not hasattr(_of_thread, "buffer"):
        buffer = mmap.mmap(-1, CHUNK_BYTES)
        _of_thread.buffer = buffer, ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return _of_thread.buffer
