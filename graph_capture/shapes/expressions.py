"""Whole numbers as expressions of sizes, kept as text: ``4*seq``, ``16*(side // 8)``.

The text is Python, of names, whole numbers and a few operators, and nothing else is evaluated. This
needs no torch, so that a graph over a range can be read on a machine that has none.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from typing import Any

from remat.graph_capture.errors import GraphError

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: lambda a, b: a**b,
}
_CALLS: dict[str, Callable[..., Any]] = {"max": max, "min": min}
_COMPARES: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}
MOST_POWER = 8
"""The highest power that is evaluated: a text of a file must not make endless numbers."""


def evaluated(text: str, sizes: Mapping[str, int]) -> int:
    """The value of an expression at these sizes; of a comparison, whether it holds.

    Raises
    ------
    GraphError : the text is no such expression, or names a size that is not given.
    """
    return _value(parsed(text), sizes, text)


@functools.lru_cache(maxsize=65536)
def parsed(text: str) -> ast.expr:
    """The text as a tree.

    Raises
    ------
    GraphError : it is no expression.
    """
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise GraphError(f"{text[:80]!r} is no expression of sizes: capture again") from error


def _value(node: ast.expr, sizes: Mapping[str, int], text: str) -> Any:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name) if name in sizes:
            return sizes[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, sizes, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left, sizes, text), _value(right, sizes, text)
            is_fit = b != 0 if isinstance(op, (ast.FloorDiv, ast.Mod)) else True
            if isinstance(op, ast.Pow):
                is_fit = 0 <= b <= MOST_POWER
            if is_fit:
                return _BINARY[type(op)](a, b)
        case ast.Call(func=ast.Name(id=name), args=args) if name in _CALLS and args:
            return _CALLS[name]([_value(arg, sizes, text) for arg in args])
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARES:
            return _COMPARES[type(op)](_value(left, sizes, text), _value(right, sizes, text))
        case ast.BoolOp(op=op, values=values):
            held = [bool(_value(one, sizes, text)) for one in values]
            return all(held) if isinstance(op, ast.And) else any(held)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, sizes, text)
        case _:
            pass
    raise GraphError(f"{text[:80]!r} cannot be evaluated at {dict(sizes)}: capture again")


def never_falls(text: str, least: Mapping[str, int]) -> bool:
    """Whether the expression never falls where a size grows, from the `least` sizes on.

    It is told from the form. False where the form does not tell.
    """
    return _grows(parsed(text), least)


def _grows(node: ast.expr, least: Mapping[str, int]) -> bool:
    match node:
        case ast.Constant() | ast.Name():
            return True
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _grows(left, least) and _grows(right, least)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _grows(left, least) and not names_in(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _grows_from_zero(left, least) and _grows_from_zero(right, least)
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right) if not names_in(right):
            return _value(right, {}, "") > 0 and _grows(left, least)
        case ast.BinOp(left=left, op=ast.Pow(), right=right) if not names_in(right):
            return _value(right, {}, "") >= 0 and _grows_from_zero(left, least)
        case ast.Call(func=ast.Name(id=name), args=args) if name in _CALLS:
            return all(_grows(arg, least) for arg in args)
        case _:
            return not names_in(node)


def _grows_from_zero(node: ast.expr, least: Mapping[str, int]) -> bool:
    """Whether it never falls and is never below 0: if it grows, its least value is the first."""
    return _grows(node, least) and _value(node, least, "") >= 0


def names_in(node: ast.expr) -> set[str]:
    """The sizes that an expression names."""
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return names - _CALLS.keys()
