"""One open file that many values lie in: a process may have few files open, often 1,024.

Each value has a range of whole blocks. That a value has ended is noted by a method of C
(`endings.py`), and looked at when the next range is taken. The file is closed when no range of it
is left, so with the last value of a step.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from typing import Any

from remat.graph_capture.unnamed_files.endings import Ending, closer

BLOCK_BYTES = 4096
"""Direct reads and writes have multiples of it, from memory and at offsets that are such."""
UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.ENOSYS)
"""What systems answer that do not know a way of opening or writing."""

Range = tuple[int, int]
"""Where it begins, and where it ends, in bytes of the file."""


class SharedFile:
    """An open file, closed when nothing holds this object any more.

    Attributes
    ----------
    descriptor : of the file. is_direct : whether it goes past the page cache.
    size_bytes : of all ranges, and of the gaps between them.
    """

    def __init__(self, descriptor: int, is_direct: bool) -> None:
        self.descriptor, self.is_direct = descriptor, is_direct
        closer().watch(self, descriptor)
        self.size_bytes, self._gaps = 0, list[Range]()
        self._ended: queue.SimpleQueue[Ending[Range]] = queue.SimpleQueue()
        self._held: dict[int, Ending[Range]] = {}
        self._taking = threading.Lock()

    def take(self, holder: Any, size_bytes: int) -> int:
        """Where a free range of so many bytes begins; it is free again once `holder` has ended.

        Raises
        ------
        OSError : the disk has no room for it.
        """
        size_bytes = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        with self._taking:
            self._gather()
            gaps = [gap for gap in self._gaps if gap[1] - gap[0] >= size_bytes]
            if not gaps:
                self._grow(size_bytes)
                gaps = self._gaps[-1:] if size_bytes else [(0, 0)]
            start, end = min(gaps, key=lambda gap: gap[1] - gap[0])
            if size_bytes:
                self._gaps.remove((start, end))
                self._give_back((start + size_bytes, end))
            ending = Ending(holder, self._ended.put, (start, start + size_bytes))
            self._held[id(ending)] = ending
        return start

    def _gather(self) -> None:
        """Take back the ranges whose holders have ended."""
        while not self._ended.empty():
            ending = self._ended.get()
            del self._held[id(ending)]
            self._give_back(ending.fact)

    def _give_back(self, given: Range) -> None:
        """Add a gap, as one with those that it touches."""
        start, end = given
        if start == end:
            return
        for gap in [gap for gap in self._gaps if gap[1] == start or gap[0] == end]:
            self._gaps.remove(gap)
            start, end = min(start, gap[0]), max(end, gap[1])
        self._gaps.append((start, end))

    def _grow(self, size_bytes: int) -> None:
        """Have a last gap of so many bytes. A full disk is an error now, not amid a copy."""
        end = self.size_bytes
        at_end = (gap[1] - gap[0] for gap in self._gaps if gap[1] == end)
        more_bytes = size_bytes - sum(at_end)
        try:
            if more_bytes:
                os.posix_fallocate(self.descriptor, end, more_bytes)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
        self.size_bytes = end + more_bytes
        self._give_back((end, self.size_bytes))
