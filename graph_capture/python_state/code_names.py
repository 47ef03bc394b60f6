"""Which names a function's code loads: of globals, of ``self``, and of any other object.

A name that is only known as the code runs, as in `getattr(self, f"scale_{i}")`, may be any.
"""

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
_IDLE = frozenset({"CACHE", "NOP", "RESUME", "EXTENDED_ARG"})


@dataclass
class Names:
    """Names that code loads.

    Attributes
    ----------
    global_names : of its module. own : attributes of its first argument, ``self`` in a method.
    others : attributes of anything else. stored : attributes that it sets, of anything, with
        the line of the first.
    modules : that it imports as it runs, each with the level of a relative import.
    asks_own, asks_others : whether it may ask for an attribute by a name that it puts together: of
        its first argument, of anything else.
    """

    global_names: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    stored: dict[str, int] = field(default_factory=dict)
    modules: set[tuple[str, int]] = field(default_factory=set)
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
    """Note what is loaded and stored by name; `line` is that of the code's first."""
    for i, instruction in enumerate(instructions):
        name = instruction.opname
        line = getattr(instruction.positions, "lineno", None) or line
        if name in _GLOBAL:
            found.global_names.add(str(instruction.argval))
        elif name in _ATTRIBUTE:
            is_own = i > 0 and _loads(instructions[i - 1], first)
            (found.own if is_own else found.others).add(str(instruction.argval))
        elif name == "LOAD_SUPER_ATTR":
            found.own.add(str(instruction.argval))
        elif name == "IMPORT_NAME":
            found.modules.add((str(instruction.argval), _level(instructions[:i])))
        elif name == "IMPORT_FROM":
            found.others.add(str(instruction.argval))
        elif name in _STORE:
            found.stored.setdefault(str(instruction.argval), line)


def _level(before: list[dis.Instruction]) -> int:
    """How many packages up an import begins: what is pushed first of its two arguments."""
    level = before[-2].argval if len(before) > 1 else 0
    return level if isinstance(level, int) else 0


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
    """Where the second argument of a call begins whose function was loaded just now.

    And whether something else than the call takes what is there, to make a name of it. The first
    argument is complete where it is alone on the stack for the last time.
    """
    depth, second, is_taken = 0, 0, False
    for i, one in enumerate(after):
        before, depth = depth, depth + dis.stack_effect(one.opcode, one.arg, jump=False)
        is_load = one.opname.startswith("LOAD_") and depth > before
        lowest = before if is_load else min(before, depth - 1)
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
