"""One process at a time: what is read, merged and written again loses nothing of the others'."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path

TRIES, WAIT_S = 200, 0.05
"""A save takes milliseconds. One that was stopped in the middle must not stop all others."""
NO_LOCKS = errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF
"""What file systems answer that have no locks."""


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold a file against other processes and threads that do so too, by a lock beside it.

    The system lets go of the lock of a process that dies. Where a file system has no locks, or one
    is held for too long, the block runs without.

    Raises
    ------
    OSError : the lock cannot be made, as in a folder that cannot be written.
    """
    beside = path.with_name(f"{path.name}.lock")
    handle = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _wait_for(handle)
        yield
    finally:
        os.close(handle)


def _wait_for(handle: int) -> None:
    for _ in range(TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(WAIT_S)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return
        else:
            return
