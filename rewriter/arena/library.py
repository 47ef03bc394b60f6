"""The allocator in C++, as Python calls it. Arenas are named by numbers."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from remat.graph_capture.errors import ArenaError
from remat.rewriter.arena.building import built_library

Ints = NDArray[np.int64]
_INTS = np.ctypeslib.ndpointer(np.int64, flags="C_CONTIGUOUS")
_INT = ctypes.c_int64


@dataclass(frozen=True)
class Counts:
    """What became of requests.

    Attributes
    ----------
    hits : served as planned.
    unplanned, occupied, kept : missed, and so served by torch's allocator: none of that size was
        planned, another block of the step lies in the place, or what the user has kept does.
    missed_bytes : of those.
    moved_out : requests that are left to torch's allocator from then on, since the user keeps what
        they are for, such as gradients, into the next step.
    """

    hits: int = 0
    unplanned: int = 0
    occupied: int = 0
    kept: int = 0
    missed_bytes: int = 0
    moved_out: int = 0

    @property
    def misses(self) -> int:
        """Requests that were not served as planned."""
        return self.unplanned + self.occupied + self.kept


_N_COUNTS = len(fields(Counts))


class ArenaLibrary:
    """Each function of `cpu.cpp`. Loading puts its allocator before torch's, for good."""

    def __init__(self, path: Path) -> None:
        try:
            self._c = ctypes.CDLL(str(path))
        except OSError as error:
            raise ArenaError(
                f"the arena's library cannot be loaded: {error}. Remove {path}, so that it is "
                "compiled anew"
            ) from error
        self._c.remat_arena_open.argtypes = [_INTS, _INTS, _INTS, _INT, _INT]
        self._c.remat_arena_open.restype = _INT
        self._c.remat_arenas_mapped.restype = _INT
        self._c.remat_arena_close.argtypes = [_INT]
        self._c.remat_arena_begin.argtypes = [_INT, _INT, _INT]
        self._c.remat_arena_counts.argtypes = [_INT, _INTS]
        self._c.remat_arena_end.argtypes = self._c.remat_record_end.argtypes = [_INTS]
        self._c.remat_record_call.argtypes = [_INT]
        self._c.remat_record_call.restype = _INT
        self._c.remat_record_read.argtypes = [_INTS, _INT]
        if self._c.remat_arena_install():
            raise ArenaError(
                "torch's allocator for the CPU was replaced by one without a raw deleter, which no "
                "arena can stand before: use the arena without that allocator"
            )

    def open(self, sizes: Ints, offsets: Ints, may_outlive: Ints, arena_bytes: int) -> int:
        """A new arena for calls of these sizes; an offset of -1 leaves one to torch."""
        columns = [np.ascontiguousarray(each, np.int64) for each in (sizes, offsets, may_outlive)]
        number: int = self._c.remat_arena_open(*columns, len(sizes), arena_bytes)
        if not number:
            raise ArenaError(
                f"the system has no {arena_bytes} bytes for an arena: make a plan for a smaller "
                "budget"
            )
        return number

    def close(self, number: int) -> None:
        """Serve nothing more; its memory goes with the last block that lies in it."""
        self._c.remat_arena_close(number)

    def begin(self, number: int, first: int, end: int) -> None:
        """Arm this thread: its calls are those from `first` up to `end`."""
        self._c.remat_arena_begin(number, first, end)

    def end(self) -> Counts:
        """Disarm this thread, and what was counted since it was armed."""
        out = np.zeros(_N_COUNTS, np.int64)
        self._c.remat_arena_end(out)
        return Counts(*out.tolist())

    def is_armed(self) -> bool:
        """Whether this thread is served from an arena, or records."""
        return bool(self._c.remat_is_armed())

    def counts(self, number: int) -> Counts:
        """What was counted since the arena was opened; zeros once it is closed."""
        out = np.zeros(_N_COUNTS, np.int64)
        self._c.remat_arena_counts(number, out)
        return Counts(*out.tolist())

    def arenas_mapped(self) -> int:
        """How many arenas are open, or hold a block that something still uses."""
        return int(self._c.remat_arenas_mapped())

    def record_open(self) -> None:
        """Start a record; blocks taken in its parts are followed until `record_close`."""
        self._c.remat_record_open()

    def record_begin(self) -> None:
        """Record what this thread asks for."""
        self._c.remat_record_begin()

    def record_end(self) -> tuple[int, int]:
        """End a part: calls and events of the record so far."""
        out = np.zeros(2, np.int64)
        self._c.remat_record_end(out)
        return int(out[0]), int(out[1])

    def record_call(self, address: int) -> int:
        """The recorded call that took the live block at `address`; -1 if none did."""
        return int(self._c.remat_record_call(address))

    def record_read(self, n_events: int) -> Ints:
        """[events, 2]: the size asked for and the call, or -1 and the call that is given back."""
        out = np.zeros((n_events, 2), np.int64)
        self._c.remat_record_read(out, n_events)
        return out

    def record_close(self) -> None:
        """Forget the record."""
        self._c.remat_record_close()


@functools.cache
def arena_library() -> ArenaLibrary:
    """The library, loaded once a process.

    Raises
    ------
    ArenaError : it cannot be built or loaded.
    """
    return ArenaLibrary(built_library())
