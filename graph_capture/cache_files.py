"""Files that are kept for later processes: costs, plans, parts of clusters.

A file is data and is not believed: it is read whole or not at all, and one that says what it cannot
is told of and made anew. A folder that cannot be written stops nothing: that is said once, and what
would have been kept is made again in the next process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from remat.graph_capture.errors import FileError, RematError, TextError
from remat.graph_capture.files import MOST_FILE_BYTES, file_lock, read_contents, write_contents

_T = TypeVar("_T")
_SEAL_BYTES = 65
"""Of the first line of a sealed file, which is a digest of the rest."""
_told: set[tuple[str, Path]] = set()
"""Kinds of file and their folders that were said not to be writable."""


def cache_folder() -> Path:
    """``$REMAT_CACHE``, or the folder ``remat`` in the user's cache folder.

    For a user without a home it is a folder of this process, which goes with it.
    """
    own = os.environ.get("REMAT_CACHE")
    if own:
        return Path(own)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # HOME is not set, and the system knows none of this user
        return Path(_own_folder().name)
    return Path(base) / "remat"


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    warnings.warn(
        "there is no home folder, so costs and plans are kept for this process alone: set "
        "REMAT_CACHE to a folder to keep them",
        stacklevel=4,
    )
    return tempfile.TemporaryDirectory(prefix="remat-")


@dataclass(frozen=True)
class CacheFiles:
    """The kept files of one kind."""

    what: str  # is kept, as ``costs``
    otherwise: str  # what to do where the folder cannot be written, in words
    folder: str = ""  # within `cache_folder`; left empty, that one itself
    is_sealed: bool = True  # begins with a digest, by which damage is seen
    most_files: int = 0  # those not used for longest go first; 0 for any number
    most_bytes: int = MOST_FILE_BYTES  # of one file: more is neither kept nor read

    def path(self, name: str) -> Path:
        return cache_folder() / self.folder / name

    def read(self, name: str, decode: Callable[[bytes], _T]) -> _T | None:
        """What `decode` makes of a file; None if there is none. A damaged one is warned of."""
        path = self.path(name)
        try:
            if not path.exists():
                return None
            found = decode(self._contents(path))
        except (OSError, RematError) as error:
            warnings.warn(
                f"{path} of the kept {self.what} is ignored, and made anew: {error}", stacklevel=3
            )
            return None
        with contextlib.suppress(OSError):  # The folder may be read-only; then no file is removed.
            # Its age tells when it was used last.
            os.utime(path)
        return found

    def write(self, name: str, data: bytes) -> None:
        """Keep a file, whole and at once; of two processes that do, the last one's stays."""
        if len(data) <= self.most_bytes:
            self._kept(name, contextlib.nullcontext(), lambda: data)

    def merge(self, name: str, make: Callable[[], bytes]) -> None:
        """As `write`, of what `make` returns while no other process merges into the same file."""
        self._kept(name, file_lock(self.path(name)), make)

    def _kept(
        self, name: str, alone: contextlib.AbstractContextManager[None], make: Callable[[], bytes]
    ) -> None:
        path = self.path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with alone:
                data = make()
                seal = hashlib.sha256(data).hexdigest().encode() + b"\n" if self.is_sealed else b""
                write_contents(path, seal + data)
            if self.most_files:
                self._remove_oldest(path)
        except OSError as error:
            self._say_once(path.parent, error)

    def _contents(self, path: Path) -> bytes:
        if path.stat().st_size > self.most_bytes + _SEAL_BYTES:
            raise TextError(f"it is larger than {self.most_bytes} bytes, as none of them is")
        data = read_contents(path)
        if not self.is_sealed:
            return data
        digest, _, data = data.partition(b"\n")
        if digest != hashlib.sha256(data).hexdigest().encode():
            raise TextError("it is damaged")
        return data

    def _remove_oldest(self, kept: Path) -> None:
        used: list[tuple[int, Path]] = []
        for path in kept.parent.glob(f"*{kept.suffix}"):
            # Another process may remove files at the same time.
            with contextlib.suppress(FileNotFoundError):
                used.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(used)[: max(0, len(used) - self.most_files)]:
            path.unlink(missing_ok=True)

    def _say_once(self, folder: Path, error: OSError) -> None:
        if (self.what, folder) in _told:
            return
        _told.add((self.what, folder))
        said = f"{error}" if isinstance(error, FileError) else f"{folder}: {error.strerror}"
        warnings.warn(
            f"{self.what} are not kept: {said}. Set REMAT_CACHE to a folder that can be written, "
            f"or {self.otherwise}",
            stacklevel=4,
        )
