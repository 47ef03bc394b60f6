"""The allocator in C++, as Python calls it. Arenas are named by numbers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from remat.graph_capture.errors import ArenaError
from remat.graph_capture.files import cache_folder
from remat.graph_capture.graph import Ints

_HERE = Path(__file__).parent
_SOURCES = _HERE / "cpu.cpp", _HERE / "arena.h"
_TORCH = Path(torch.__file__).parent
_WITHOUT = "or train without an arena: a plan keeps its budget without one too"

BUILD = "arena-build-"  # what the names of folders begin with in which a library is being made
STALE_S = 3600.0  # no compiler takes so long: an older folder is of a process that was killed


def built_library() -> Path:
    """The compiled library for this torch, from the cache; compiling takes some seconds."""
    if sys.platform != "linux":
        raise ArenaError(
            f"train without an arena, which only works on Linux (this is {platform.system()}): a "
            "plan keeps its budget without one too"
        )
    flags = _flags()  # no wheel can bring it: it derives from a class of one torch release
    release = "".join(c if c.isalnum() or c == "." else "-" for c in torch.__version__)
    path = cache_folder() / f"arena-cpu-torch-{release}-{_digest(flags)}.so"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for left in path.parent.glob(f"{BUILD}*"):  # processes that were killed have left these
                with contextlib.suppress(FileNotFoundError):  # another process removes it as well
                    if time.time() - left.stat().st_mtime > STALE_S:
                        shutil.rmtree(left)
            with tempfile.TemporaryDirectory(prefix=BUILD, dir=path.parent) as folder:
                made = Path(folder) / path.name
                _compile([*_compiler(), *flags, "-o", str(made)])
                os.replace(made, path)  # at once: other processes may build or load it
        except OSError as error:
            raise ArenaError(
                f"set REMAT_CACHE to a folder that can be written, {_WITHOUT}. The arena's "
                f"library cannot be kept in {path.parent}: {error}"
            ) from error
    return path


def _flags() -> list[str]:
    abi = int(torch.compiled_with_cxx11_abi())  # with another ABI, torch's functions are not found
    libraries = _TORCH / "lib"
    return [
        "-O2", "-std=c++20", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-I{_TORCH / 'include'}", str(_SOURCES[0]),
        f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10",
    ]  # fmt: skip


def _digest(flags: list[str]) -> str:
    digest = hashlib.sha256("\0".join(flags).encode())  # a changed source or flag is another file
    for source in _SOURCES:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _compiler() -> list[str]:
    wanted = shlex.split(os.environ.get("CXX", ""))  # may bring options: CXX="ccache g++"
    choices = [wanted] if wanted else [["g++"], ["c++"], ["clang++"]]
    found = next((choice for choice in choices if shutil.which(choice[0])), None)
    if found is None:
        names = ", ".join(choice[0] for choice in choices)
        raise ArenaError(
            f"install g++, name a compiler in the variable CXX, {_WITHOUT}. An arena needs a C++ "
            f"compiler, and there is none ({names})"
        )
    return found


def _compile(command: list[str]) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        lines = run.stderr.splitlines()
        ended = f"it ended with status {run.returncode}"
        told = next((line for line in lines if "error" in line), lines[-1] if lines else ended)
        raise ArenaError(
            f"name another C++20 compiler in the variable CXX, {_WITHOUT}. {command[0]} cannot "
            f"compile the arena's library: {told.strip()}"
        )


_INTS = np.ctypeslib.ndpointer(np.int64, flags="C_CONTIGUOUS")
_INT = ctypes.c_int64


@dataclass(frozen=True)
class Counts:
    """What became of requests: `hits` as planned, all others served by torch's allocator."""

    hits: int = 0
    unplanned: int = 0  # none of that size was planned
    occupied: int = 0  # another block of the step lies in the place
    kept: int = 0  # what the user has kept lies in the place
    missed_bytes: int = 0
    moved_out: int = 0  # left to torch from then on, since the user keeps them

    @property
    def misses(self) -> int:
        return self.unplanned + self.occupied + self.kept


_N_COUNTS = len(fields(Counts))


class ArenaLibrary:
    """Each function of `cpu.cpp`. Loading puts its allocator before torch's, for good."""

    def __init__(self, path: Path) -> None:
        try:
            self._c = ctypes.CDLL(str(path))
        except OSError as error:
            raise ArenaError(
                f"remove {path}, so that it is compiled anew: the arena's library cannot be "
                f"loaded ({error})"
            ) from error
        self._c.remat_arena_open.argtypes = [_INTS, _INTS, _INTS, _INT, _INT]
        self._c.remat_arena_open.restype = _INT
        self._c.remat_arena_close.argtypes = [_INT]
        self._c.remat_arena_begin.argtypes = [_INT, _INT, _INT]
        self._c.remat_arena_counts.argtypes = [_INT, _INTS]
        self._c.remat_arena_end.argtypes = self._c.remat_record_end.argtypes = [_INTS]
        self._c.remat_record_call.argtypes = [_INT]
        self._c.remat_record_call.restype = _INT
        self._c.remat_record_read.argtypes = [_INTS, _INT]
        self.begin, self.close = self._c.remat_arena_begin, self._c.remat_arena_close
        self.is_armed = self._c.remat_is_armed
        # Blocks taken in the record's parts are followed from `record_open` until `record_close`.
        self.record_open, self.record_close = self._c.remat_record_open, self._c.remat_record_close
        self.record_begin = self._c.remat_record_begin
        # The recorded call that took the live block at an address; -1 if none did.
        self.record_call = self._c.remat_record_call
        if self._c.remat_arena_install():
            raise ArenaError(
                "use the arena without that allocator: torch's CPU allocator was replaced by one "
                "without a raw deleter, which an arena cannot wrap"
            )

    def open(self, sizes: Ints, offsets: Ints, may_outlive: Ints, arena_bytes: int) -> int:
        """The number of a new arena for calls of these sizes; offset -1 leaves one to torch."""
        columns = [np.ascontiguousarray(each, np.int64) for each in (sizes, offsets, may_outlive)]
        number: int = self._c.remat_arena_open(*columns, len(sizes), arena_bytes)
        if not number:
            raise ArenaError(
                f"plan for a smaller budget: the system does not have {arena_bytes} bytes for an "
                "arena"
            )
        return number

    def end(self) -> Counts:
        out = np.zeros(_N_COUNTS, np.int64)
        self._c.remat_arena_end(out)
        return Counts(*out.tolist())

    def counts(self, number: int) -> Counts:
        """Of all steps since the arena was opened; zeros once it is closed."""
        out = np.zeros(_N_COUNTS, np.int64)
        self._c.remat_arena_counts(number, out)
        return Counts(*out.tolist())

    def record_end(self) -> tuple[int, int]:
        out = np.zeros(2, np.int64)
        self._c.remat_record_end(out)
        return int(out[0]), int(out[1])

    def record_read(self, n_events: int) -> Ints:
        """[events, 2]: the size asked for and the call, or -1 and the call that is given back."""
        out = np.zeros((n_events, 2), np.int64)
        self._c.remat_record_read(out, n_events)
        return out


@functools.cache
def arena_library() -> ArenaLibrary:
    return ArenaLibrary(built_library())  # its allocator stays before torch's: load it once
