"""One member of a zip archive, read after the whole archive was judged.

Archives of `torch.export` come from anywhere too. So sizes and names of all members are looked at
in the directory of the archive, and nothing is unpacked but the one member that is wanted. No code
of torch is involved: its readers unpickle what they find.
"""

from __future__ import annotations

import zipfile
import zlib
from collections import Counter
from pathlib import Path, PurePosixPath

from remat.graph_capture.errors import ArchiveError, FileError
from remat.graph_capture.files.contents import MOST_FILE_BYTES

MOST_RATIO = 100
"""Bytes of all members to bytes of the file. torch packs nothing; a packed plan stays below 30."""
FORMAT = "archive_format", b"pt2"
"""A member of every archive of `torch.export`, and what it holds."""
_BROKEN = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError,
    OverflowError,
)  # fmt: skip
"""What `zipfile` raises for a broken file, one that is encrypted, or one packed in another way."""


def archived(path: Path, name: str) -> bytes | None:
    """A member of a ``.pt2`` archive, by its name below the archive's root; None without one.

    Raises
    ------
    ArchiveError : it is no such archive, is cut short, or is not what `torch.export` writes.
    FileError : it cannot be read.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            size_bytes = file.seek(0, 2)
            members = archive.infolist()
            _check_sizes(members, size_bytes)
            root = _checked_root(members)
            if _read(archive, members, f"{root}/{FORMAT[0]}") != FORMAT[1]:
                raise ArchiveError(f"it has no {FORMAT[0]} that says {FORMAT[1].decode()}")
            return _read(archive, members, f"{root}/{name}")
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    except _BROKEN as error:
        raise ArchiveError(str(error) or type(error).__name__) from error


def _check_sizes(members: list[zipfile.ZipInfo], file_bytes: int) -> None:
    """Raise `ArchiveError` if unpacking would give more than the file can hold in earnest."""
    unpacked_bytes = sum(member.file_size for member in members)
    if unpacked_bytes > MOST_RATIO * file_bytes:
        raise ArchiveError(
            f"it says that it unpacks to {unpacked_bytes} bytes, from a file of {file_bytes}"
        )


def _checked_root(members: list[zipfile.ZipInfo]) -> str:
    """The folder that all members are in; raises `ArchiveError` for a name out of place."""
    names = [member.orig_filename for member in members]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ArchiveError(f"it has two members {twice[0]!r}")
    roots = {name.partition("/")[0] for name in names}
    for name in names:
        parts = PurePosixPath(name).parts
        if len(parts) < 2 or parts[0] == "/" or ".." in parts or not name.isprintable():
            raise ArchiveError(f"it has a member of the name {name!r}")
        if "\\" in name or "//" in name:
            raise ArchiveError(f"it has a member of the name {name!r}")
    if len(roots) != 1:
        raise ArchiveError(f"its members are in {len(roots)} folders, not in one")
    return roots.pop()


def _read(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], name: str) -> bytes | None:
    """What a member holds, up to the size that it says."""
    member = next((member for member in members if member.orig_filename == name), None)
    if member is None:
        return None
    if member.file_size > MOST_FILE_BYTES:
        raise ArchiveError(f"its {name} is larger than {MOST_FILE_BYTES} bytes")
    return archive.read(member)
