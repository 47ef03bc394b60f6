"""The folders that such files are in, before anything is written.

On a CPU, whose memory is the device's, files are the tier that plans call the host.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from remat.graph_capture.errors import FileError, TierError
from remat.graph_capture.unnamed_files.files import HOST_FOLDER, Folder, require_calls


def host_folder() -> str:
    """The folder that is a CPU's host: that of `HOST_FOLDER`, or the system's temporary one."""
    return os.environ.get(HOST_FOLDER) or tempfile.gettempdir()


def require_writable(folder: str, tier: str = "host") -> None:
    """Write a block there.

    Raises
    ------
    FileError : there is no such folder, or it cannot be written.
    TierError : the system cannot keep values in files.
    """
    require_calls(tier)
    if not Path(folder).is_dir():
        raise FileError(f"{folder} is no folder: name one on the drive that is to be used")
    try:
        Folder(folder, tier)
    except TierError as error:
        why = getattr(error.__cause__, "strerror", None) or error.__cause__
        raise FileError(f"{folder} cannot be written ({why}): name a folder of your own") from error


def free_on_drive_bytes(folder: str) -> int:
    """Bytes that new files in `folder` may take.

    Raises
    ------
    FileError : there is no such folder.
    """
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise FileError(
            f"{folder} is no folder ({error.strerror}): name one on the drive that is to be used"
        ) from error
