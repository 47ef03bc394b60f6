"""Numba where it is installed: the same functions, compiled. Nothing else here knows of it.

Functions that are decorated keep to what both NumPy and Numba run, and give equal results either
way. Install it by ``pip install 'remat[numba]'``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    _numba: Any = importlib.import_module("numba")
except ImportError:
    _numba = None

IS_COMPILED = hasattr(_numba, "njit")
"""Whether decorated functions run as machine code. A folder of that name is no Numba."""


def compiled(function: Function) -> Function:
    """`function` compiled by Numba on its first call and kept on disk, or as it is."""
    # Numba aborts the process on cached functions that call themselves: none of ours does.
    return _numba.njit(cache=True)(function) if IS_COMPILED else function


def loops_or_arrays(loops: Function, arrays: Function) -> Function:
    """One function written twice: loops for Numba, whole arrays for NumPy alone."""
    return compiled(loops) if IS_COMPILED else arrays
