"""The least and the most that an expression of sizes can come to where each size has a range.

Interval arithmetic (Moore 1966, Interval Analysis): what it gives bounds all values, and is exact
where each size is named once. So bytes are bounded for all sizes of a part at once, also where they
may fall as a size grows.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Mapping

from remat.graph_capture.errors import GraphError
from remat.graph_capture.shapes.expressions import MOST_POWER, evaluated, names_in, parsed

Interval = tuple[int, int]


def bounds_of(text: str, low: Mapping[str, int], high: Mapping[str, int]) -> Interval:
    """Bounds of an expression where each size is from its `low` to its `high`, both included.

    Raises
    ------
    GraphError : the text is no expression of these sizes, or divides by what may be 0.
    """
    return _bounds(parsed(text), low, high, text)


def _bounds(node: ast.expr, low: Mapping[str, int], high: Mapping[str, int], text: str) -> Interval:
    if not names_in(node):
        value = evaluated(ast.unparse(node), {})
        return value, value
    match node:
        case ast.Name(id=name) if name in low:
            return low[name], high[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            least, most = _bounds(operand, low, high, text)
            return -most, -least
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _bounds(left, low, high, text), _bounds(right, low, high, text)
            found = _BINARY[type(op)](a, b)
            if found is not None:
                return found
        case ast.Call(func=ast.Name(id=name), args=args) if name in ("max", "min") and args:
            of = max if name == "max" else min
            each = [_bounds(arg, low, high, text) for arg in args]
            return of(one[0] for one in each), of(one[1] for one in each)
        case _:
            pass
    raise GraphError(f"{text[:80]!r} cannot be bounded over a range: capture again")


def _ends(of: Callable[[int, int], int], a: Interval, b: Interval) -> Interval:
    """Bounds of a function that goes one way in each argument: it is at its ends at theirs."""
    found = [of(x, y) for x, y in itertools.product(a, b)]
    return min(found), max(found)


def _divided(a: Interval, b: Interval) -> Interval | None:
    return None if b[0] <= 0 <= b[1] else _ends(lambda x, y: x // y, a, b)


def _remainder(a: Interval, b: Interval) -> Interval | None:
    if b[0] <= 0:
        return None
    if b[0] == b[1] and a[0] // b[0] == a[1] // b[0]:
        return a[0] % b[0], a[1] % b[0]
    return 0, b[1] - 1


def _power(a: Interval, b: Interval) -> Interval | None:
    if b[0] != b[1] or not 0 <= b[0] <= MOST_POWER:
        return None
    least, most = _ends(lambda x, y: x**y, a, b)
    return (0 if a[0] < 0 < a[1] and b[0] % 2 == 0 and b[0] else least), most


_BINARY: dict[type[ast.operator], Callable[[Interval, Interval], Interval | None]] = {
    ast.Add: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    ast.Sub: lambda a, b: (a[0] - b[1], a[1] - b[0]),
    ast.Mult: lambda a, b: _ends(lambda x, y: x * y, a, b),
    ast.FloorDiv: _divided,
    ast.Mod: _remainder,
    ast.Pow: _power,
}
