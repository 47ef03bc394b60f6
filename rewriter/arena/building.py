"""The allocator in C++, compiled when it is first needed and kept in the cache folder.

A wheel cannot bring it: it derives from a class of torch, and so is of one release of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from remat.graph_capture.errors import ArenaError
from remat.graph_capture.files.kept_files import cache_folder

_HERE = Path(__file__).parent
_SOURCES = _HERE / "cpu.cpp", _HERE / "arena.h"
_TORCH = Path(torch.__file__).parent
_WITHOUT = "or train without an arena: a plan keeps its budget without one too"

BUILD = "arena-build-"
"""How folders begin in which a library is being made."""
STALE_S = 3600.0
"""No compiler takes so long. A folder that is older is of a process that was killed."""


def built_library() -> Path:
    """The compiled library for this torch; compiles for some seconds where it is not kept yet.

    Raises
    ------
    ArenaError : the system is not Linux, there is no C++ compiler, it fails, or the cache folder
        cannot be written.
    """
    if sys.platform != "linux":
        raise ArenaError(
            f"train without an arena, which works on Linux alone, and this is {platform.system()}: "
            "a plan keeps its budget without one too"
        )
    flags = _flags()
    path = cache_folder() / f"arena-cpu-torch-{_slug(torch.__version__)}-{_digest(flags)}.so"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _clear(path.parent)
            with tempfile.TemporaryDirectory(prefix=BUILD, dir=path.parent) as folder:
                made = Path(folder) / path.name
                _compile([*_compiler(), *flags, "-o", str(made)])
                # At once: other processes may build the same, or load it already.
                os.replace(made, path)
        except OSError as error:
            raise ArenaError(
                f"the arena's library cannot be kept in {path.parent}: {error}. Set REMAT_CACHE to "
                f"a folder that can be written, {_WITHOUT}"
            ) from error
    return path


def _clear(folder: Path) -> None:
    """Remove what processes that were killed have left of their builds."""
    for left in folder.glob(f"{BUILD}*"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it as well
            if time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left)


def _flags() -> list[str]:
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    libraries = _TORCH / "lib"
    return [
        "-O2", "-std=c++20", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-I{_TORCH / 'include'}", str(_SOURCES[0]),
        f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10",
    ]  # fmt: skip


def _digest(flags: list[str]) -> str:
    digest = hashlib.sha256("\0".join(flags).encode())
    for source in _SOURCES:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c == "." else "-" for c in text)


def _compiler() -> list[str]:
    """The compiler with its own options, as in ``CXX="ccache g++"``."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    choices = [wanted] if wanted else [["g++"], ["c++"], ["clang++"]]
    found = next((choice for choice in choices if shutil.which(choice[0])), None)
    if found is None:
        names = ", ".join(choice[0] for choice in choices)
        raise ArenaError(
            f"an arena needs a C++ compiler, and there is none ({names}): install g++, name one by "
            f"the variable CXX, {_WITHOUT}"
        )
    return found


def _compile(command: list[str]) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        lines = run.stderr.splitlines()
        ended = f"it ended with status {run.returncode}"
        told = next((line for line in lines if "error" in line), lines[-1] if lines else ended)
        raise ArenaError(
            f"{command[0]} cannot compile the arena's library: {told.strip()}. Name another "
            f"compiler by the variable CXX, with C++20, {_WITHOUT}"
        )
