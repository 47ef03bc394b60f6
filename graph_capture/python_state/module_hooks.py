"""Forward hooks of submodules: they are code of forward, so a plan holds what they compute.

A library may set them itself, as transformers does to record hidden states. Which hooks a module
has is Python's state like any other: kept, compared before each step, and put back. Hooks of
backward are not of this kind, since backward is traced once and never runs Python again.
"""

from __future__ import annotations

import builtins
import enum
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from remat.graph_capture.python_state.code_names import names_of

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
ALL_HOOKS = (*FORWARD_HOOKS, *BACKWARD_HOOKS)
_BY_VALUE = (int, float, complex, str, bytes, enum.Enum)
_DEPTH = 5
"""How far functions are compared inside functions: one may hold itself."""


@dataclass(frozen=True)
class Hook:
    """One hook of a module. Two are equal if the same function is called in the same way.

    Attributes
    ----------
    table : that it is in. key : its number there, by which its handle removes it.
    with_kwargs, always : how it was registered.
    """

    table: str
    function: Any
    with_kwargs: bool
    always: bool
    key: int = field(compare=False)

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def is_like(self, other: Hook) -> bool:
        """Whether both do the same: of one code, with equal values around it."""
        how = (self.table, self.with_kwargs, self.always)
        return how == (other.table, other.with_kwargs, other.always) and _is_like(
            self.function, other.function, _DEPTH
        )


Registered = tuple[Hook, ...]


@dataclass(frozen=True)
class ModuleHooks:
    """The place of a module's forward hooks.

    Attributes
    ----------
    text : what it is, for a person. value : the hooks that there were.
    """

    text: str
    module: nn.Module
    value: Registered

    def now(self) -> Registered:
        """The hooks that there are."""
        return hooks_of(self.module)

    def put(self, value: Registered) -> None:
        """Register these and no others; leave them if they do the same."""
        if not are_alike(self.now(), value):
            set_hooks(self.module, value)

    def term(self, name: Callable[[Any], str]) -> str:
        """An expression that is true while the very functions are registered."""
        return f"{name(hooks_of)}({name(self.module)}) == {name(self.value)}"


def hooks_of(module: nn.Module) -> Registered:
    """The forward hooks of a module, in the order in which they run."""
    space = vars(module)
    always = space["_forward_hooks_always_called"]
    return tuple(
        Hook(table, function, key in space[f"{table}_with_kwargs"], key in always, key)
        for table in FORWARD_HOOKS
        for key, function in space[table].items()
    )


def set_hooks(module: nn.Module, hooks: Registered) -> None:
    """Let a module have just these forward hooks."""
    space = vars(module)
    names = [f"{table}{end}" for table in FORWARD_HOOKS for end in ("", "_with_kwargs")]
    for name in (*names, "_forward_hooks_always_called"):
        space[name].clear()
    for hook in hooks:
        space[hook.table][hook.key] = hook.function
        if hook.with_kwargs:
            space[f"{hook.table}_with_kwargs"][hook.key] = True
        if hook.always:
            space["_forward_hooks_always_called"][hook.key] = True


def are_alike(some: Registered, others: Registered) -> bool:
    """Whether two modules' hooks do the same, in the same order."""
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(one.is_like(other) for one, other in pairs)


def hooked_modules(model: nn.Module, loss_fn: Any = None) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of all whose hooks run inside a step.

    Not the model itself: each call of a planned module runs its hooks around the step.
    """
    yield from ((path, module) for path, module in model.named_modules() if path)
    if isinstance(loss_fn, nn.Module):
        for path, module in loss_fn.named_modules(prefix="loss_fn"):
            if module is not model:
                yield path, module


def place_of_hooks(path: str, module: nn.Module) -> ModuleHooks:
    """The place of a module's hooks, with those that it has now."""
    text = f"forward hook on submodule {path} ({type(module).__name__})"
    return ModuleHooks(text, module, hooks_of(module))


def _is_like(one: Any, other: Any, depth: int) -> bool:
    """Whether two functions do the same: one code, and equal values around it."""
    if one is other:
        return True
    if type(one) is type(other) and isinstance(one, (*_BY_VALUE, MethodType)):
        return bool(one == other)
    is_pair = isinstance(one, FunctionType) and isinstance(other, FunctionType)
    if not is_pair or one.__code__ is not other.__code__ or not depth:
        return False
    mine, theirs = _around(one), _around(other)
    alike = all(_is_like(a, b, depth - 1) for a, b in zip(mine, theirs, strict=False))
    return len(mine) == len(theirs) and alike


def _around(function: FunctionType) -> list[Any]:
    """What a function has beside its code: defaults, and variables of functions around it."""
    cells = [_content(cell) for cell in function.__closure__ or ()]
    named = function.__kwdefaults__ or {}
    return [*cells, *(function.__defaults__ or ()), *named, *named.values()]


def tells_a_person(function: Any) -> str:
    """What a hook prints or logs with, which leaves no sign in Python's state; empty if nothing."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return ""
    for name in sorted(names_of(function.__code__).global_names):
        value = function.__globals__.get(name, getattr(builtins, name, None))
        if value in (print, logging, warnings) or isinstance(value, logging.Logger):
            return name
    return ""


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def holds_traced(function: Any) -> bool:
    """Whether a hook that was made while a step is traced keeps a tensor of the trace."""
    stack, seen = [function], set[int]()
    while stack:
        one = stack.pop()
        if isinstance(one, (FakeTensor, FunctionalTensor)):
            return True
        if id(one) in seen or isinstance(one, (nn.Module, type, Tensor)):
            continue
        seen.add(id(one))
        stack.extend(_parts(one))
    return False


def _parts(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):
        return _around(value)
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set)):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())
