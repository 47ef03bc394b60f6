"""One process at a time: what is read, merged and written again loses nothing of the others'."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Generator
from pathlib import Path

from filelock import FileLock, Timeout

WAIT_S = 10.0
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
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(FileLock(path.with_name(f"{path.name}.lock"), timeout=WAIT_S))
        except OSError as error:
            # Of filelock's own, `Timeout` is an OSError too.
            if not isinstance(error, Timeout) and error.errno not in NO_LOCKS:
                raise
        yield
