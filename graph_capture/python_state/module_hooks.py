"""Forward hooks of submodules: they are code of forward, so a plan holds what they compute.

Libraries set some too. Which hooks a module has is kept, compared before each step, and put back.
Not hooks of backward, which is traced once and never runs Python again.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from remat.graph_capture.torch_private.core import FakeTensor, FunctionalTensor

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_FAST = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF")
_STORE = ("STORE_ATTR", "DELETE_ATTR")
_IDLE = frozenset({"CACHE", "NOP", "RESUME", "EXTENDED_ARG"})


@dataclass
class Names:
    global_names: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)  # of its first argument, ``self`` in a method
    others: set[str] = field(default_factory=set)  # attributes of anything else
    stored: dict[str, int] = field(default_factory=dict)  # that it sets, with the first line
    modules: set[tuple[str, int]] = field(default_factory=set)  # imported as it runs, with level
    # Whether it asks its first argument, or anything else, for a name known only as it runs.
    asks_own: bool = False
    asks_others: bool = False


@cache
def names_of(code: CodeType) -> Names:
    """The names that `code` loads, and the functions written inside it."""
    found = Names()
    first = code.co_varnames[0] if code.co_argcount else None
    for part in _with_inner(code):
        instructions = list(dis.get_instructions(part))
        _add(found, instructions, part.co_firstlineno, first)
        _add_asked(found, instructions, first)
    # `getattr(self, "p")` names an attribute by a text; any short text may be such a name.
    texts = {c for part in _with_inner(code) for c in _constants(part.co_consts)}
    found.others |= {text for text in texts if text.isidentifier()}
    return found


def _add(found: Names, instructions: list[dis.Instruction], line: int, first: str | None) -> None:
    for i, instruction in enumerate(instructions):
        name = instruction.opname
        # An instruction without a line is on that of the one before.
        line = getattr(instruction.positions, "lineno", None) or line
        if name in _GLOBAL:
            found.global_names.add(str(instruction.argval))
        elif name in _ATTRIBUTE:
            is_own = i > 0 and _loads(instructions[i - 1], first)
            (found.own if is_own else found.others).add(str(instruction.argval))
        elif name == "LOAD_SUPER_ATTR":
            found.own.add(str(instruction.argval))
        elif name == "IMPORT_NAME":
            # It takes two arguments, of which the level of a relative import was pushed first.
            level = instructions[i - 2].argval if i > 1 else 0
            found.modules.add((str(instruction.argval), level if isinstance(level, int) else 0))
        elif name == "IMPORT_FROM":
            found.others.add(str(instruction.argval))
        elif name in _STORE:
            found.stored.setdefault(str(instruction.argval), line)


def _add_asked(found: Names, instructions: list[dis.Instruction], first: str | None) -> None:
    """Note calls of `getattr` whose name is no constant."""
    all_of_it = [one for one in instructions if one.opname not in _IDLE]
    for i, one in enumerate(all_of_it):
        if one.argval == "getattr" and one.opname in _GLOBAL:
            after = all_of_it[i + 1 :]
            second, is_taken = _second_argument(after)
            if is_taken or after[second].opname != "LOAD_CONST":
                is_own = second == 1 and _loads(after[0], first)
                found.asks_own |= is_own
                found.asks_others |= not is_own


def _second_argument(after: list[dis.Instruction]) -> tuple[int, bool]:
    """Where the second argument begins of a call whose function was loaded just now, and whether
    something else than the call takes it. The first ends where it is last alone on the stack."""
    depth, second, is_taken = 0, 0, False
    for i, one in enumerate(after):
        before, depth = depth, depth + dis.stack_effect(one.opcode, one.arg, jump=False)
        is_load = one.opname.startswith("LOAD_") and depth > before
        lowest = before if is_load else min(before, depth - 1)  # a load only pushes
        if lowest < 0:
            break
        if depth == 1:
            second, is_taken = i + 1, False
        elif lowest < 2 and i > second:
            is_taken = True
    return second, is_taken


def _loads(instruction: dis.Instruction, first: str | None) -> bool:
    """Whether an instruction loads the first argument last."""
    value = instruction.argval
    # Python 3.13 loads two variables by one instruction.
    if instruction.opname.startswith("LOAD_FAST_") and isinstance(value, tuple):
        value = value[-1]
    return first is not None and instruction.opname.startswith(_FAST) and value == first


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _constants(values: tuple[object, ...]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str) and len(value) < 64:
            yield value
        elif isinstance(value, tuple):
            yield from _constants(value)


FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
ALL_HOOKS = (*FORWARD_HOOKS, *BACKWARD_HOOKS)
_BY_VALUE = (int, float, complex, str, bytes, enum.Enum)
_DEPTH = 5  # how far functions are compared inside functions: one may hold itself


@dataclass(frozen=True)
class Hook:
    """Two are equal if the same function is called in the same way."""

    table: str
    function: Any
    with_kwargs: bool
    always: bool
    key: int = field(compare=False)  # by which its handle removes it

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def is_like(self, other: Hook) -> bool:
        """Whether both do the same: of one code, with equal values around it."""
        same = (self.table, self.with_kwargs) == (other.table, other.with_kwargs)
        same = same and self.always == other.always
        return same and _is_like(self.function, other.function, _DEPTH)


_Registered = tuple[Hook, ...]


@dataclass(frozen=True)
class ModuleHooks:
    """The place of a module's forward hooks; `value`: those that there were."""

    text: str
    module: nn.Module
    value: _Registered

    def now(self) -> _Registered:
        return _hooks_of(self.module)

    def put(self, value: _Registered) -> None:
        """Register these and no others; leave them if they do the same."""
        if are_alike(self.now(), value):
            return
        space = vars(self.module)
        names = [f"{table}{end}" for table in FORWARD_HOOKS for end in ("", "_with_kwargs")]
        for name in (*names, "_forward_hooks_always_called"):
            space[name].clear()  # in place: handles refer to these very tables
        for hook in value:
            space[hook.table][hook.key] = hook.function
            if hook.with_kwargs:
                space[f"{hook.table}_with_kwargs"][hook.key] = True
            if hook.always:
                space["_forward_hooks_always_called"][hook.key] = True

    def term(self, name: Callable[[Any], str]) -> str:
        return f"{name(_hooks_of)}({name(self.module)}) == {name(self.value)}"


def _hooks_of(module: nn.Module) -> _Registered:
    space = vars(module)
    always = space["_forward_hooks_always_called"]
    return tuple(
        Hook(table, function, key in space[f"{table}_with_kwargs"], key in always, key)
        for table in FORWARD_HOOKS
        for key, function in space[table].items()
    )


def are_alike(some: _Registered, others: _Registered) -> bool:
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(one.is_like(other) for one, other in pairs)


def hooked_modules(model: nn.Module, loss_fn: Any = None) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of all whose hooks run inside a step."""
    # Not the model itself: each call of a planned module runs its hooks around the step.
    yield from ((path, module) for path, module in model.named_modules() if path)
    if isinstance(loss_fn, nn.Module):
        named = loss_fn.named_modules(prefix="loss_fn")
        yield from ((path, module) for path, module in named if module is not model)


def place_of_hooks(path: str, module: nn.Module) -> ModuleHooks:
    text = f"forward hook on submodule {path} ({type(module).__name__})"
    return ModuleHooks(text, module, _hooks_of(module))


def _is_like(one: Any, other: Any, depth: int) -> bool:
    if one is other:
        return True
    if type(one) is type(other) and isinstance(one, (*_BY_VALUE, MethodType)):
        return bool(one == other)
    is_pair = isinstance(one, FunctionType) and isinstance(other, FunctionType)
    if not is_pair or one.__code__ is not other.__code__ or not depth:
        return False
    mine, theirs = _around(one), _around(other)
    pairs = zip(mine, theirs, strict=False)
    return len(mine) == len(theirs) and all(_is_like(a, b, depth - 1) for a, b in pairs)


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
