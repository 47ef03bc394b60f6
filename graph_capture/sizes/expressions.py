"""Whole numbers as expressions of sizes, kept as text: ``4*seq``, ``16*(side // 8)``.

The text is Python, of names, whole numbers and a few operators, and nothing else is evaluated. This
needs no torch, so that a graph over a range can be read on a machine that has none.
"""

from __future__ import annotations

import ast
import functools
import itertools
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
_MOST_POWER = 8
"""The highest power that is evaluated: a text of a file must not make endless numbers."""


def evaluated(text: str, sizes: Mapping[str, int]) -> int:
    """The value of an expression at these sizes; of a comparison, whether it holds."""
    return _value(parsed(text), sizes, text)


@functools.lru_cache(maxsize=65536)
def parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    # The last two come of texts that are nested too deep.
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
                is_fit = 0 <= b <= _MOST_POWER
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
    """Whether its form tells that it never falls where a size grows, from the `least` sizes on."""
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
            # Of two that grow, the product grows only if neither is negative.
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
    # As it grows, its value at the least sizes is the least.
    return _grows(node, least) and _value(node, least, "") >= 0


def names_in(node: ast.expr) -> set[str]:
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return names - _CALLS.keys()


_Interval = tuple[int, int]


def bounds_of(text: str, low: Mapping[str, int], high: Mapping[str, int]) -> _Interval:
    """Bounds of an expression where each size is from its `low` to its `high`, both included."""
    # Interval arithmetic (Moore 1966, Interval Analysis) bounds all values, also where they may
    # fall as a size grows, and is exact where each size is named once.
    return _bounds(parsed(text), low, high, text)


def _bounds(
    node: ast.expr, low: Mapping[str, int], high: Mapping[str, int], text: str
) -> _Interval:
    if not names_in(node):
        value = evaluated(ast.unparse(node), {})
        return value, value
    match node:
        case ast.Name(id=name) if name in low:
            return low[name], high[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            least, most = _bounds(operand, low, high, text)
            return -most, -least
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY_INTERVALS:
            a, b = _bounds(left, low, high, text), _bounds(right, low, high, text)
            found = _BINARY_INTERVALS[type(op)](a, b)
            if found is not None:
                return found
        case ast.Call(func=ast.Name(id=name), args=args) if name in ("max", "min") and args:
            of = max if name == "max" else min
            each = [_bounds(arg, low, high, text) for arg in args]
            return of(one[0] for one in each), of(one[1] for one in each)
        case _:
            pass
    raise GraphError(f"{text[:80]!r} cannot be bounded over a range: capture again")


def _ends(of: Callable[[int, int], int], a: _Interval, b: _Interval) -> _Interval:
    # It goes one way in each argument, so it is largest and least at their ends.
    found = [of(x, y) for x, y in itertools.product(a, b)]
    return min(found), max(found)


def _divided(a: _Interval, b: _Interval) -> _Interval | None:
    return None if b[0] <= 0 <= b[1] else _ends(lambda x, y: x // y, a, b)


def _remainder(a: _Interval, b: _Interval) -> _Interval | None:
    if b[0] <= 0:
        return None
    # Within one period the remainder rises with what is divided.
    if b[0] == b[1] and a[0] // b[0] == a[1] // b[0]:
        return a[0] % b[0], a[1] % b[0]
    return 0, b[1] - 1


def _power(a: _Interval, b: _Interval) -> _Interval | None:
    if b[0] != b[1] or not 0 <= b[0] <= _MOST_POWER:
        return None
    least, most = _ends(lambda x, y: x**y, a, b)
    # An even power is 0 where its base is, inside of the interval.
    return (0 if a[0] < 0 < a[1] and b[0] % 2 == 0 and b[0] else least), most


_BINARY_INTERVALS: dict[type[ast.operator], Callable[[_Interval, _Interval], _Interval | None]] = {
    ast.Add: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    ast.Sub: lambda a, b: (a[0] - b[1], a[1] - b[0]),
    ast.Mult: lambda a, b: _ends(lambda x, y: x * y, a, b),
    ast.FloorDiv: _divided,
    ast.Mod: _remainder,
    ast.Pow: _power,
}


class SizeArgument(int):
    """A whole number. `text` says how it follows from the sizes, see `sizes/expressions.py`."""

    text: str

    # With a default, as copies are made from the number alone.
    def __new__(cls, value: int, text: str = "") -> SizeArgument:
        made = super().__new__(cls, value)
        made.text = text
        return made


class FloatOfSizes(float):
    """A float. `text` is Python of sizes and of the functions that are `bound` to its names."""

    # It does what the model's code did, operation by operation, so that its bits are eager's.
    text: str
    bound: dict[str, Any]

    def __new__(
        cls, value: float, text: str = "", bound: dict[str, Any] | None = None
    ) -> FloatOfSizes:
        made = super().__new__(cls, value)
        made.text, made.bound = text, bound or {}
        return made
