"""What files hold: read whole within a limit, and written so that the old file survives a failure.

Graphs, plans, profiles, fronts, reports and exports go through here. What the system refuses, such
as a full disk, becomes one `FileError`.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import functools
import hashlib
import os
import secrets
import stat
import tempfile
import time
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, ClassVar, Self, TypeVar

import msgspec
from filelock import FileLock, Timeout

from remat.graph_capture.errors import ArchiveError, FileError, RematError, ShapeError, TextError

MOST_FILE_BYTES = 1 << 30  # of a file read whole. A graph of 100,000 ops takes a twentieth of it.
_CHUNK_BYTES = 1 << 20
_OPEN_FILES = "/proc/self/fd"
_NO_NAMELESS = errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL  # where nameless files are unknown
IN_USE = 5, 32  # Windows says access denied, or a sharing violation, of a file that is open
WAITS_S = (0.01, 0.05, 0.2, 0.5)  # readers have a file for milliseconds


def read_contents(path: str | Path) -> bytes:
    """All bytes of a file, or of a pipe; `FileError` for what cannot be read, or is too large."""
    _require_name(path)
    parts, size_bytes = list[bytes](), 0
    try:
        with open(path, "rb") as file:
            while part := file.read(_CHUNK_BYTES):  # in parts: /dev/zero has no end, says no size
                parts.append(part)
                size_bytes += len(part)
                if size_bytes > MOST_FILE_BYTES:
                    raise FileError(
                        f"name another file: {path} is larger than {MOST_FILE_BYTES} bytes, and "
                        "no file of remat is"
                    )
    except OSError as error:
        raise _told(error, f"{path}") from error
    return b"".join(parts)


def write_contents(path: str | Path, data: bytes) -> None:
    with atomic_write(path) as out:
        out.write(data)


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Generator[BinaryIO]:
    """A new file, which takes the place of `path` if the block ends without an error.

    It is written beside the old one, and has its mode and owner. Symbolic links are followed; of
    several hard links, only the named one gets the new file. Pipes and devices, ``/dev/stdout``
    among them, are written to as they are."""
    _require_name(path)
    try:
        is_stream = _is_stream(path)
        with open(path, "wb") if is_stream else _beside(Path(os.path.realpath(path))) as out:
            yield out
    except OSError as error:
        raise _told(error, f"cannot write {path}") from error


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before work is done for it."""
    _require_name(path)
    try:
        if path.is_dir():
            raise FileError(f"name a file in it: {path} is a folder")
        if not path.parent.is_dir():
            text = f"cannot write {path.name}: there is no folder {path.parent}"
            raise FileError(text)
        if _is_stream(path):
            return
        target = Path(os.path.realpath(path))
        is_protected = target.exists() and not os.access(target, os.W_OK)
    except OSError as error:
        raise _told(error, f"cannot write {path}") from error
    if not os.access(target.parent, os.W_OK):
        raise FileError(f"cannot write {path}: you have no permission to write in {target.parent}")
    if is_protected:
        raise FileError(f"cannot write {path}: the file is write-protected")


def _is_stream(path: str | Path) -> bool:
    """Whether it is a pipe or a device, or stands for an open file."""
    folder = os.path.realpath(os.path.dirname(path))
    if folder == "/dev" or folder.startswith("/proc/"):  # /dev/stdout may be a file
        return True
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(mode)


@contextlib.contextmanager
def _beside(target: Path) -> Generator[BinaryIO]:
    old = target.stat() if target.exists() else None
    if old and not os.access(target, os.W_OK):  # who protected it meant that nobody writes it
        raise PermissionError("it is write-protected")
    fresh = target.with_name(f".remat-{secrets.token_hex(8)}.tmp")  # the target's may be too long
    handle, is_named = _fresh_file(fresh)
    try:
        with os.fdopen(handle, "wb") as out:
            if old:
                _take_over(out.fileno(), old)
            yield out
            out.flush()
            os.fsync(out.fileno())  # some file systems notice a full disk only here
            if not is_named:
                # With a folder given, Python follows the link to the open file; else it links that.
                os.link(f"{_OPEN_FILES}/{out.fileno()}", fresh, src_dir_fd=out.fileno())
        _put_in_place(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)


def _put_in_place(fresh: Path, target: Path) -> None:
    for wait_s in WAITS_S:  # Windows replaces no file that somebody has open
        try:
            return os.replace(fresh, target)
        except PermissionError as error:
            if getattr(error, "winerror", None) not in IN_USE:
                raise
            time.sleep(wait_s)
    return os.replace(fresh, target)


def _fresh_file(fresh: Path) -> tuple[int, bool]:
    """A new file to write to, and whether it has its name already."""
    nameless = getattr(os, "O_TMPFILE", 0)  # nothing is left after a kill
    if nameless and os.path.isdir(_OPEN_FILES):
        try:
            return os.open(fresh.parent, nameless | os.O_WRONLY, 0o666), False
        except OSError as error:
            if error.errno not in _NO_NAMELESS:
                raise
    return os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), True


def _take_over(handle: int, old: os.stat_result) -> None:
    now = os.fstat(handle)
    if (now.st_uid, now.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(PermissionError):  # only root may give it away: it becomes ours
            os.fchown(handle, old.st_uid, old.st_gid)
    if hasattr(os, "fchmod"):  # else only that it is write-protected, and then it stays
        os.fchmod(handle, stat.S_IMODE(old.st_mode))


def _told(error: OSError, what: str) -> FileError:
    is_told = isinstance(error, FileError)
    return error if is_told else FileError(f"{what}: {error.strerror or error}")


def _require_name(path: str | Path) -> None:
    if "\0" in os.fspath(path):  # Python would raise a `ValueError` for it, not an `OSError`
        raise FileError(f"{os.fspath(path)!r} is not a file name: it has a NUL")


_Kind = TypeVar("_Kind")

_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decode_json(data: bytes | str, kind: type[_Kind]) -> _Kind:
    """The value in a JSON text; `TextError` for another text, `ShapeError` for other fields."""
    try:  # files come from anywhere, so no error of the decoder goes further
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise ShapeError(str(error)) from error
    except msgspec.DecodeError as error:
        raise TextError(_cause(data, str(error))) from error
    except UnicodeError as error:
        raise TextError(_cause(data, f"it is not UTF-8: {error}")) from error
    except RecursionError as error:
        raise TextError("it is nested too deeply to be read") from error


class _Header(msgspec.Struct):
    schema_version: int | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds: one JSON object, of a schema version that this release reads."""

    noun: ClassVar[str]
    again: ClassVar[str]  # how to make a file that this release reads, for messages
    error: ClassVar[type[RematError]]
    reads: ClassVar[tuple[int, ...]] = (1,)  # schema versions; files are written as of the last
    schema_version: int = 0  # 0 stands for this release's

    def __post_init__(self) -> None:
        if self.schema_version not in (0, *self.reads):
            raise self._another_version(self.schema_version, "the file")
        # An older file is written again as of this version.
        msgspec.structs.force_setattr(self, "schema_version", self.reads[-1])

    @classmethod
    def _another_version(cls, version: int, name: str) -> RematError:
        reads = f"and this release reads {cls.reads[-1]}"
        return cls.error(f"{cls.again}: {name} has schema version {version}, {reads}")

    def to_json(self) -> bytes:
        """Encode as JSON; `from_json` reads it back to an equal object."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str, name: str = "the file") -> Self:
        """Read what `to_json` wrote.

        Raises
        ------
        RematError : of this class's kind, for another text or another schema version.
        """
        try:
            version = decode_json(data, _Header).schema_version
            if version in (None, *cls.reads):
                return decode_json(data, cls)
        except RematError as error:
            text = f"{cls.again}: {name} is not a {cls.noun} of this release ({error})"
            raise cls.error(text) from error
        raise cls._another_version(version, name)  # whose fields may be others


def _cause(data: bytes | str, said: str) -> str:
    """What the decoder said, or what a person would call it."""
    start = data[:3].encode("utf-8", "replace") if isinstance(data, str) else data[:3]
    if not data.strip():
        return f"{said}: it is empty"
    if start.startswith(_MARKS):
        return "it begins with a byte order mark: save it as UTF-8 without one"
    return said


WAIT_S = 10.0  # a save takes milliseconds. One that was stopped halfway must not stop all others.
NO_LOCKS = errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF  # file systems without locks


@contextlib.contextmanager
def file_lock(path: Path) -> Generator[None]:
    """Hold a file against others that do so, by a lock beside it. Without locks, or if one is held
    for too long, the block runs unlocked. `OSError`: the folder cannot be written."""
    with contextlib.ExitStack() as held:
        try:
            # The system lets go of the lock of a process that dies.
            held.enter_context(FileLock(path.with_name(f"{path.name}.lock"), timeout=WAIT_S))
        except OSError as error:
            # Of filelock's own, `Timeout` is an OSError too.
            if not isinstance(error, Timeout) and error.errno not in NO_LOCKS:
                raise
        yield


_MOST_RATIO = 100  # members to file, in bytes. torch packs nothing; a packed plan stays below 30.
_FORMAT = "archive_format", b"pt2"  # a member of every archive of `torch.export`, and what it holds
_BROKEN = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError,
    OverflowError,
)  # fmt: skip
"""What `zipfile` raises for a broken file, one that is encrypted, or one packed in another way."""


def read_archive_member(path: Path, name: str) -> bytes | None:
    """By its name below the archive's root; None without one. ArchiveError: not as `torch.export`
    writes it, or cut short."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            size_bytes = file.seek(0, 2)
            # Members are judged by the archive's directory, and only the wanted one is unpacked:
            # torch's readers would unpickle what they find.
            members = archive.infolist()
            # More than a file of that size can hold in earnest.
            unpacked_bytes = sum(member.file_size for member in members)
            if unpacked_bytes > _MOST_RATIO * size_bytes:
                said = f"it says that it unpacks to {unpacked_bytes} bytes"
                raise ArchiveError(f"{said}, from a file of {size_bytes}")
            root = _checked_root(members)
            if _read(archive, members, f"{root}/{_FORMAT[0]}") != _FORMAT[1]:
                raise ArchiveError(f"it lacks {_FORMAT[0]}, which says {_FORMAT[1].decode()}")
            return _read(archive, members, f"{root}/{name}")
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    except _BROKEN as error:
        raise ArchiveError(str(error) or type(error).__name__) from error


def _checked_root(members: list[zipfile.ZipInfo]) -> str:
    """The folder that all members are in; raises `ArchiveError` for a name out of place."""
    names = [member.orig_filename for member in members]  # `filename` is cut at a NUL
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ArchiveError(f"it has {twice[0]!r} twice")
    roots = {name.partition("/")[0] for name in names}
    for name in names:
        parts = PurePosixPath(name).parts
        is_odd = len(parts) < 2 or parts[0] == "/" or ".." in parts
        if is_odd or not name.isprintable() or "\\" in name or "//" in name:
            raise ArchiveError(f"it has a member named {name!r}")
    if len(roots) != 1:
        raise ArchiveError(f"its members are in {len(roots)} folders, not in one")
    return roots.pop()


def _read(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], name: str) -> bytes | None:
    member = next((member for member in members if member.orig_filename == name), None)
    if member is None:
        return None
    if member.file_size > MOST_FILE_BYTES:
        raise ArchiveError(f"its {name} is larger than {MOST_FILE_BYTES} bytes")
    return archive.read(member)


# Costs, plans and parts of clusters, kept for later processes. A file is not believed: it is read
# whole or made anew, and that is told. A folder that cannot be written stops nothing: it is said
# once, and the next process makes again what would have been kept.

_T = TypeVar("_T")
_SEAL_BYTES = 65  # of the first line of a sealed file, which is a digest of the rest
_unwritable: set[tuple[str, Path]] = set()  # those that were said not to be writable


def cache_folder() -> Path:
    """``$REMAT_CACHE``, or ``remat`` in the user's cache folder; else one of this process."""
    if own := os.environ.get("REMAT_CACHE"):
        return Path(own)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # HOME is not set, and the system knows none of this user
        return Path(_own_folder().name)
    return Path(base) / "remat"


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    warnings.warn(
        "set REMAT_CACHE to a folder to keep costs and plans: there is no home folder, so only "
        "this process has them",
        stacklevel=4,
    )
    return tempfile.TemporaryDirectory(prefix="remat-")


@dataclass(frozen=True)
class CacheFiles:
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
                f"ignored {path} of the kept {self.what}, which is made anew: {error}", stacklevel=3
            )
            return None
        with contextlib.suppress(OSError):  # The folder may be read-only; then no file is removed.
            os.utime(path)  # its age tells when it was used last
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
            raise TextError(f"it is larger than {self.most_bytes} bytes, the most that is kept")
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
            with contextlib.suppress(FileNotFoundError):  # others may remove files meanwhile
                used.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(used)[: max(0, len(used) - self.most_files)]:
            path.unlink(missing_ok=True)

    def _say_once(self, folder: Path, error: OSError) -> None:
        if (self.what, folder) in _unwritable:
            return
        _unwritable.add((self.what, folder))
        said = f"{error}" if isinstance(error, FileError) else f"{folder}: {error.strerror}"
        warnings.warn(
            f"{self.what} are not kept ({said}): set REMAT_CACHE to a folder that can be written, "
            f"or {self.otherwise}",
            stacklevel=4,
        )
