"""Keeps what C++ code prints away from standard output, which belongs to the user's data.

HiGHS prints a line of its own from inside some repairs of solutions, whatever its output
options say; in a pipe it would end up amid JSON.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

STANDARD_OUTPUT = 1


@contextmanager
def quiet_stdout() -> Generator[None]:
    """Send file descriptor 1 nowhere for a while; Python's own buffer is flushed before."""
    try:
        sys.stdout.flush()
        kept = os.dup(STANDARD_OUTPUT)
    except (OSError, ValueError, AttributeError):
        yield  # there is no standard output to protect
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    _flush_c()
    os.dup2(nowhere, STANDARD_OUTPUT)
    try:
        yield
    finally:
        _flush_c()
        os.dup2(kept, STANDARD_OUTPUT)
        os.close(kept)
        os.close(nowhere)


def _flush_c() -> None:
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)
