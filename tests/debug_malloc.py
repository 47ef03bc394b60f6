"""glibc's own checks of the heap: what is freed is overwritten, and damage ends the process."""

from __future__ import annotations

import ctypes
import ctypes.util

import pytest

LIBRARY = "libc_malloc_debug.so.0"
"""Where glibc has them since release 2.34."""


def debug_malloc(*also_preloaded: str) -> dict[str, str]:
    """Environment variables of a process that is to run under these checks.

    The test is skipped where the system's C library has none.
    """
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        pytest.skip(f"the C library here checks no heap: {error}")
    return {
        "LD_PRELOAD": " ".join((*also_preloaded, LIBRARY)),
        "MALLOC_CHECK_": "3",
        "MALLOC_PERTURB_": "165",
    }
