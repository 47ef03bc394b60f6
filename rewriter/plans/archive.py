"""Plan files on disk: JSON, or one extra file in a ``.pt2`` archive of `torch.export`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch.export.pt2_archive import PT2ArchiveWriter

from remat.graph_capture.errors import ArchiveError, PlanError
from remat.graph_capture.files.archive import archived
from remat.graph_capture.files.contents import read_contents, replaced, write_contents
from remat.schedules.plan import AGAIN, Plan

if TYPE_CHECKING:
    from torch.export import ExportedProgram

ARCHIVE = ".pt2"
EXTRA_FILE = "remat_plan.json"
"""The plan's name among the `extra_files` of `torch.export.save`."""
_RECORD = f"extra/{EXTRA_FILE}"


class _Deferring(io.RawIOBase):
    """A file that tells of a failure when it is asked, and not when it is written to.

    torch's writer of archives writes their end when it is destroyed. An error there, from C++, ends
    the process. And there is one if the disk is full, or the file was closed after the first error.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self._lost: OSError | ValueError | None = None

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: Any) -> int:
        """Write, or do nothing once a write has failed."""
        if self._lost is None:
            try:
                self._file.write(data)
            except (OSError, ValueError) as error:  # a closed file is a ValueError
                self._lost = error
        return len(data)

    def seekable(self) -> bool:
        """Yes, since torch asks for it, for the one call of `seek` below."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Do nothing: torch rewinds a file once all is written, and a pipe has no way back."""
        return offset

    def raise_lost(self) -> None:
        """Raise what a write raised, if one did."""
        if self._lost is not None:
            raise self._lost


def save_plan(plan: Plan, path: str | Path, program: ExportedProgram | None = None) -> None:
    """Keep a plan as a file.

    Parameters
    ----------
    path : the file. A name that ends in ``.pt2`` gets an archive, any other name JSON.
    program : of `torch.export.export`, to be kept in the same archive. Without one, the archive
        holds only the plan: no weights and no program.

    Raises
    ------
    PlanError : a program is given for a file that is no archive.
    FileError : the file cannot be written; an old one is as it was.
    """
    path = Path(path)
    if path.suffix != ARCHIVE:
        if program is not None:
            raise PlanError(f"{path} holds no program: name the file with {ARCHIVE} to keep both")
        write_contents(path, plan.to_json() + b"\n")
    elif program is not None:
        with replaced(path) as out:
            deferring: Any = _Deferring(out)  # torch declares less than it takes
            extra = {EXTRA_FILE: plan.to_json().decode()}
            torch.export.save(program, deferring, extra_files=extra)
            deferring.raise_lost()
    else:
        packed = io.BytesIO()
        with PT2ArchiveWriter(packed) as archive:
            archive.write_bytes(_RECORD, plan.to_json())
        write_contents(path, packed.getvalue())


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a JSON file or a ``.pt2`` archive.

    Raises
    ------
    PlanError : the file is no plan, is cut short, or the archive holds none.
    FileError : the file cannot be read.
    """
    path = Path(path)
    data = read_contents(path) if path.suffix != ARCHIVE else _from_archive(path)
    return Plan.from_json(data, str(path))


def _from_archive(path: Path) -> bytes:
    try:
        found = archived(path, _RECORD)
    except ArchiveError as error:
        raise PlanError(
            f"{path} is no {ARCHIVE} archive, or is cut short ({error}). {AGAIN}"
        ) from error
    if found is None:
        raise PlanError(
            f"{path} holds no plan: put it there with remat.save_plan(plan, path, program), or "
            f"torch.export.save(program, path, extra_files={{{EXTRA_FILE!r}: ...}})"
        )
    return found
