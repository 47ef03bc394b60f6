"""Which names a function's code loads: of globals, of ``self``, and of any other object."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from types import CodeType

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_FAST = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF")
_STORE = ("STORE_ATTR", "DELETE_ATTR")


@dataclass
class Names:
    """Names that code loads.

    Attributes
    ----------
    global_names : of its module. own : attributes of its first argument, ``self`` in a method.
    others : attributes of anything else. stored : attributes that it sets, of anything, with
        the line of the first.
    """

    global_names: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    stored: dict[str, int] = field(default_factory=dict)


@cache
def names_of(code: CodeType) -> Names:
    """The names that `code` loads, and the functions written inside it."""
    found = Names()
    first = code.co_varnames[0] if code.co_argcount else None
    for part in _with_inner(code):
        _add(found, part, first)
    # `getattr(self, "p")` names an attribute by a text; any short text may be such a name.
    texts = {c for part in _with_inner(code) for c in _constants(part.co_consts)}
    found.others |= {text for text in texts if text.isidentifier()}
    return found


def _add(found: Names, code: CodeType, first: str | None) -> None:
    before: dis.Instruction | None = None
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        line = getattr(instruction.positions, "lineno", None) or line
        if name in _GLOBAL:
            found.global_names.add(str(instruction.argval))
        elif name in _ATTRIBUTE:
            is_own = before is not None and _loads(before, first)
            (found.own if is_own else found.others).add(str(instruction.argval))
        elif name == "LOAD_SUPER_ATTR":
            found.own.add(str(instruction.argval))
        elif name in _STORE:
            found.stored.setdefault(str(instruction.argval), line)
        before = instruction


def _loads(instruction: dis.Instruction, first: str | None) -> bool:
    """Whether an instruction loads the first argument last."""
    value = instruction.argval
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
