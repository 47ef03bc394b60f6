"""How fast files of a folder are written and read: the links of a CPU, and those to NVMe.

A copy goes as that of a step does, by the same code.

To measure a folder moves less than a GiB each way, and each series of copies ends early once it
took `MOST_S`. So the cache of a drive is not exhausted: what is written for minutes may be slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

from remat.formats import MIB
from remat.graph_capture.costs.link_speeds import (
    BYTES_PER_US_IN_GB_S,
    LinkPair,
    LinkSpeed,
    speed_of,
)
from remat.graph_capture.errors import FileError
from remat.graph_capture.spill_files import File, Folder, require_writable

SIZES = (MIB, 4 * MIB, 16 * MIB)
MORE_THREADS = (2, 4)
REPEATS, MOST_S = 3, 1.0
"""Of one series, which is copies of one size one way."""
_MOST_BESIDE = 24
"""Copies of the largest size the other way, after which a very uneven link is alone."""


class FileMeter:
    """Copies between memory and files of a folder; `threads` share each copy.

    Raises FileError if the folder is not there or cannot be written, OSError if it has no room.
    """

    def __init__(self, folder: str, threads: int = 1) -> None:
        require_writable(folder)
        self.folder, self.threads = Folder(folder, "host"), threads
        # Threads, files and memory of their own for each way, as both may copy at once.
        self.pools = {is_down: ThreadPoolExecutor(threads) for is_down in (True, False)}
        self.files = {
            (is_down, size): self._parts(size) for is_down in (True, False) for size in SIZES
        }
        # Ones, so that all pages are there.
        self.memory = {is_down: bytearray(b"1" * max(SIZES)) for is_down in (True, False)}
        self.moved_bytes = 0

    def _parts(self, size_bytes: int) -> list[File]:
        ends = [size_bytes * i // self.threads for i in range(self.threads + 1)]
        return [File(self.folder, end - start) for start, end in pairwise(ends)]

    def fill(self) -> None:
        # Files without holes: reading a hole does not touch the drive.
        for is_down, size_bytes in self.files:
            self._share(True, is_down, size_bytes)

    def close(self) -> None:
        for pool in self.pools.values():
            pool.shutdown()
        self.files.clear()

    def speed(self, is_down: bool) -> LinkSpeed:
        return speed_of(self.times_us(is_down), self._times_beside_us(is_down))

    def times_us(self, is_down: bool, sizes: tuple[int, ...] = SIZES) -> dict[int, float]:
        return {size: self._best_us(is_down, size) for size in sizes}

    def _times_beside_us(self, is_down: bool) -> dict[int, float]:
        ended = threading.Event()

        def other() -> None:
            copies = 0
            # Not for ever: a drive's cache must not be exhausted.
            while copies < _MOST_BESIDE and not ended.is_set():
                self._share(not is_down, not is_down, max(SIZES))
                copies += 1

        with ThreadPoolExecutor(1) as busy:
            beside = busy.submit(other)
            try:
                found = self.times_us(is_down)
            finally:
                ended.set()
            beside.result()
        return found

    def _best_us(self, is_down: bool, size_bytes: int) -> float:
        times, end = list[float](), time.perf_counter() + MOST_S
        while len(times) < REPEATS and not (times and time.perf_counter() > end):
            start = time.perf_counter()
            self._share(is_down, is_down, size_bytes)
            times.append(1e6 * (time.perf_counter() - start))
        return min(times)

    def _share(self, is_down: bool, which: bool, size_bytes: int) -> None:
        """One copy of memory into the files `which` of that size, or of them into memory."""
        self.moved_bytes += size_bytes
        at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory[which]))
        doing = list[Future[None]]()
        for file in self.files[which, size_bytes]:
            copy = file.write_from if is_down else file.read_to
            doing.append(self.pools[which].submit(copy, at))
            at += file.size_bytes
        for one in doing:
            one.result()


def file_pair(folder: str, threads: Sequence[int] = ()) -> LinkPair:
    """Both ways between memory and files in `folder`, by one thread each, as a step copies.

    `threads` are tried only for a look at what they would reach. Raises FileError.
    """
    try:
        with contextlib.closing(FileMeter(folder)) as meter:
            meter.fill()
            down, up = meter.speed(is_down=True), meter.speed(is_down=False)
        return LinkPair(
            down, up, folder, threads_gb_s={n: _threads_gb_s(folder, n) for n in threads}
        )
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"files in {folder} cannot be written and read ({error.strerror}): name another folder"
        ) from error


def _threads_gb_s(folder: str, threads: int) -> float:
    size_bytes = SIZES[-1]
    with contextlib.closing(FileMeter(folder, threads)) as meter:
        meter.fill()
        both_us = sum(meter.times_us(way, (size_bytes,))[size_bytes] for way in (True, False))
    return 2 * size_bytes / both_us / BYTES_PER_US_IN_GB_S
