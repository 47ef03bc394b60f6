"""Objects of torch's and Python's own classes that hold a user's numbers: which are looked into.

Such as an optimizer's rate or a sampler's epoch. Those attributes count that the user's code names,
or that methods which it names read, as `get_last_lr` reads ``_last_lr``. Objects that change by
themselves, as loggers, are left out.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import pickle
import sys
from typing import Any

from torch import Tensor, nn

_OF_TORCH = (
    "torch.amp", "torch.ao.quantization", "torch.cuda.amp", "torch.distributions", "torch.nn.utils",
    "torch.optim", "torch.utils.data",
)  # fmt: skip
_OF_TOOLS = frozenset({
    "abc", "ast", "asyncio", "builtins", "codecs", "concurrent", "contextlib", "dataclasses",
    "enum", "functools", "importlib", "inspect", "logging", "pathlib", "re", "selectors", "socket",
    "ssl", "subprocess", "tempfile", "traceback", "types", "typing", "unittest", "warnings",
    "weakref",
})  # fmt: skip
"""Modules of Python whose objects are tools, or note for themselves what they have done."""
DATA = frozenset({"data_source", "dataset"})  # if the user's own code names them
NUMBERS_OF_C = (ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._SimpleCData)
_PROXY = ("multiprocessing.managers", "BaseProxy")
_RAW = (mmap.mmap, memoryview)
_TEXTS = (io.StringIO, io.BytesIO)


def is_looked_into(kind: type) -> bool:
    """Whether objects of a library's class hold what a user sets."""
    module: Any = kind.__module__
    if not isinstance(module, str) or issubclass(kind, nn.Module):  # it may be anything
        return False
    root = module.partition(".")[0]
    if root == "torch":
        return module.startswith(_OF_TORCH)
    return root not in _OF_TOOLS and root in sys.stdlib_module_names


def memory_of(value: Any) -> bytes | str | None:
    """What an object of C holds, which no attribute shows; None for any other object."""
    if isinstance(value, NUMBERS_OF_C):
        return bytes(value)
    if isinstance(value, _RAW):
        return value.tobytes() if isinstance(value, memoryview) else value[:]
    if isinstance(value, _TEXTS):
        return value.getvalue()
    return _beside_this_process(value)


def _beside_this_process(value: Any) -> bytes | None:
    """What processes share: a manager's object, or the count of a semaphore, as of an event."""
    kind = type(value)
    # A lock counts to 1, and holds no number.
    if kind.__module__ == "_multiprocessing" and getattr(value, "maxvalue", 1) > 1:
        return bytes(str(value._get_value()), "ascii")
    if any((one.__module__, one.__name__) == _PROXY for one in kind.__mro__):
        return pickle.dumps(value._getvalue())
    return None


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """What was set on a tensor by name; of a subclass, which keeps its own parts there, nothing."""
    return vars(tensor) if type(tensor) in (Tensor, nn.Parameter, nn.Buffer) else {}
