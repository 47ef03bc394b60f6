"""What a walk over Python's state finds, and what of it is followed."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections import ChainMap, UserDict, UserList, UserString
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from remat.graph_capture.python_state.module_hooks import Names
from remat.graph_capture.python_state.state_slots import OpaqueState, StateSlot, Stream
from remat.graph_capture.torch_private.core import FakeTensor, FunctionalTensor

_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "triton", "remat", "builtins"})
STATE = frozenset({"_parameters", "_buffers", "_modules", "training"})  # a module's, guarded apart
RUN_BY_TORCH = frozenset({"forward", "backward", "setup_context", "jvp", "vjp"})
NOT_RUN = frozenset({
    "__init_subclass__", "__repr__", "__str__", "__del__", "__reduce__", "__reduce_ex__",
    "__getstate__", "__setstate__", "__dir__", "__copy__", "__deepcopy__", "__class_getitem__",
    "__setattr__", "__delattr__",
})  # fmt: skip
OF_DATA = frozenset({"types", "argparse", "collections", "_thread"})
"""Modules of Python whose objects hold a user's data, as a `SimpleNamespace` or a thread's own."""
AROUND_DATA = (UserDict, UserList, UserString, ChainMap)  # Python's own code reads all of them
CLASSES_OF_A_TRACE = (FunctionalTensor, FakeTensor)  # of tensors, while a step is traced
_OF_A_TRACE = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, torch.fx.Proxy)
_MOST_HELD = 10_000  # so many objects are looked at for one of these
LONGEST_NAME = 64  # of a text that may name an attribute
LruCache = type(functools.lru_cache(lambda: None))

# Objects of torch's and Python's own classes that hold a user's numbers, such as an optimizer's
# rate or a sampler's epoch, are looked into. Those attributes count that the user's code names, or
# that methods which it names read, as `get_last_lr` reads ``_last_lr``. Objects that change by
# themselves, as loggers, are left out.

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

Absent = tuple[str, dict[str, Any], set[str]]  # its text, and names that must not appear in it


@dataclass
class ReachableObjects:
    places: list[StateSlot | OpaqueState] = field(default_factory=list)  # to be compared
    caches: list[tuple[Any, Any]] = field(default_factory=list)  # of `functools`, with counts
    streams: list[Stream] = field(default_factory=list)  # the user's own
    texts: set[str] = field(default_factory=set)  # that may name attributes
    functions: int = 0  # how many were read
    # By the identity of an instance's ``__dict__``: names that code loads of it, and its class.
    reads: dict[int, set[str]] = field(default_factory=dict)
    kinds: dict[int, type] = field(default_factory=dict)
    stores: dict[str, str] = field(default_factory=dict)  # that code sets, and where it does first
    of_libraries: set[int] = field(default_factory=set)  # ids of what libraries hold, not classes

    def is_of_library(self, holder: Any) -> bool:
        if isinstance(holder, (type, FunctionType)):  # these say where they are from
            return is_installed(sys.modules.get(str(holder.__module__)))
        return id(holder) in self.of_libraries


@dataclass
class Namespace:
    text: str
    value: Any
    space: Mapping[str, Any]  # its ``__dict__``
    before: dict[str, Any] = field(default_factory=dict)  # what that held when the walk came by it
    done: set[str] = field(default_factory=set)  # compared already


def is_library(module: Any) -> bool:
    """Whether code of that module is of Python, torch, Triton, NumPy or ours, and not followed."""
    # A class may have anything under ``__module__``, as one of a file that defines Triton kernels.
    return isinstance(module, str) and module.partition(".")[0] in _LIBRARIES


def is_looked_into(kind: type) -> bool:
    """Whether objects of a library's class hold what a user sets."""
    module: Any = kind.__module__
    if not isinstance(module, str) or issubclass(kind, nn.Module):  # it may be anything
        return False
    root = module.partition(".")[0]
    if root == "torch":
        return module.startswith(_OF_TORCH)
    return root not in _OF_TOOLS and root in sys.stdlib_module_names


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """What was set on a tensor by name; of a subclass, which keeps its own parts there, nothing."""
    return vars(tensor) if type(tensor) in (Tensor, nn.Parameter, nn.Buffer) else {}


def distinct_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def is_installed(module: ModuleType | None) -> bool:
    return "site-packages" in (getattr(module, "__file__", None) or "")


def holds_tensors(value: Any) -> bool:
    """Whether a value reaches tensors, or what a trace alone has; so too if it is large."""
    seen, queue = set[int](), [value]
    while queue:
        one = queue.pop()
        if isinstance(one, _OF_A_TRACE) or any(one is kind for kind in CLASSES_OF_A_TRACE):
            return True
        if id(one) in seen or isinstance(one, (type, ModuleType)):
            continue
        seen.add(id(one))
        if len(seen) > _MOST_HELD:  # drop too much rather than keep a tensor of the trace
            return True
        if isinstance(one, FunctionType):  # its globals are not its own
            queue += [one.__defaults__, one.__kwdefaults__, *(one.__closure__ or ())]
        else:
            queue += gc.get_referents(one)
    return False


def is_users_module(module: str) -> bool:
    return not (is_library(module) or is_installed(sys.modules.get(module)))


def modules_of(function: FunctionType, names: Names) -> Iterator[ModuleType]:
    """The modules that a function imports as it runs, of those that are there."""
    package = function.__globals__.get("__package__") or ""
    for name, level in sorted(names.modules):
        # One dot means the package itself.
        below = package.split(".")[: len(package.split(".")) + 1 - level] if level else []
        parts = [*below, *filter(None, name.split("."))]
        for i in range(len(below) or 1, len(parts) + 1):
            if (module := sys.modules.get(".".join(parts[:i]))) is not None:
                yield module


def slot_names(kind: type) -> Iterator[str]:
    """Attributes of instances that are in slots, and that no property of a class hides."""
    for owner in kind.__mro__:
        for name, slot in vars(owner).items():
            is_slot = "__slots__" in vars(owner) and isinstance(slot, MemberDescriptorType)
            if is_slot and inspect.getattr_static(kind, name) is slot:
                yield name


def functions_of(value: Any) -> Iterator[FunctionType]:
    """The functions behind a class's attribute: a method of any kind, or a property."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod)):
        yield from functions_of(value.__func__)
    elif isinstance(value, property):
        yield from functions_of(value.fget)
    elif isinstance(value, (functools.cached_property, functools.partialmethod)):
        yield from functions_of(value.func)
