"""Files without names, which hold what leaves a device: they go with the process, however it ends.

On a CPU, whose memory is the device's, such files are the tier that plans call the host.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

from remat.graph_capture.errors import FileError

BLOCK_BYTES = 4096
"""Direct reads and writes have multiples of it, from memory and at offsets that are such."""


HOST_FOLDER = "REMAT_OFFLOAD"
"""The environment variable that names the folder of a CPU's host tier."""


def host_folder() -> str:
    """The folder that is a CPU's host: that of `HOST_FOLDER`, or the system's temporary one."""
    return os.environ.get(HOST_FOLDER) or tempfile.gettempdir()


def unnamed_file(folder: str) -> BinaryIO:
    """A new file in `folder` that has no name, past the system's cache where that can be had.

    Raises
    ------
    FileError : there is no such folder, or it cannot be written.
    """
    if not Path(folder).is_dir():
        raise FileError(f"{folder} is no folder: name one on the drive that is to be used")
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 the caller closes it
    except OSError as error:
        raise FileError(
            f"{folder} cannot be written ({error.strerror}): name a folder of your own"
        ) from error
    make_direct(file.fileno())
    return file  # pyright: ignore[reportReturnType]  # unbuffered, it is a raw file


def make_direct(fd: int) -> bool:
    """Have reads and writes go past the system's cache; False where the file system cannot."""
    import fcntl

    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:  # such as an older tmpfs, which is memory anyway
        return False
    return True


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
