"""Which code and which objects the walk follows: the user's, not those of torch or Python."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "remat", "builtins"})
STATE = frozenset({"_parameters", "_buffers", "_modules", "training"})
"""Of a module's ``__dict__``: compared by guards of their own."""
RUN_BY_TORCH = frozenset({"forward", "backward", "setup_context", "jvp", "vjp"})
NOT_RUN = frozenset(
    [
        "__init_subclass__",
        "__repr__",
        "__str__",
        "__del__",
        "__reduce__",
        "__reduce_ex__",
        "__getstate__",
        "__setstate__",
        "__dir__",
        "__copy__",
        "__deepcopy__",
        "__class_getitem__",
        "__setattr__",
        "__delattr__",
    ]
)
OF_DATA = frozenset({"types", "argparse", "collections", "_thread"})
"""Modules of Python whose objects hold a user's data, as a `SimpleNamespace`, a thread's own."""


def is_library(module: str | None) -> bool:
    """Whether code of that module is torch's, NumPy's, Python's or ours, and not followed."""
    return (module or "").partition(".")[0] in _LIBRARIES


def are_related(kind: type, base: type) -> bool:
    """Whether objects of one class may be objects of the other."""
    return issubclass(kind, base) or issubclass(base, kind)


def functions_behind(value: Any) -> Iterator[FunctionType]:
    """The functions behind a class's attribute: a method of any kind, or a property."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod)):
        yield from functions_behind(value.__func__)
    elif isinstance(value, property):
        yield from functions_behind(value.fget)
    elif isinstance(value, (functools.cached_property, functools.partialmethod)):
        yield from functions_behind(value.func)
