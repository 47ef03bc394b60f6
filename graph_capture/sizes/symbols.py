"""Sizes that vary: what ``dynamic=`` says of them, and expressions of them."""

from __future__ import annotations

import ast
import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from remat.graph_capture.errors import CaptureError, GraphError, SignatureError

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_CALLS: dict[str, Callable[..., Any]] = {"max": max, "min": min}
_COMPARES: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_MOST_POWER = 8  # the highest that is evaluated: a text of a file must not make endless numbers
_T = TypeVar("_T")


def evaluated(text: str, sizes: Mapping[str, int]) -> int:
    """The value of an expression at these sizes; of a comparison, whether it holds."""
    return _value(parsed(text), sizes, text)


@functools.lru_cache(maxsize=65536)
def parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    # The last two come of texts that are nested too deep.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise GraphError(f"capture again: {text[:80]!r} is not an expression of sizes") from error


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
            is_fit = not isinstance(op, ast.Pow) or 0 <= b <= _MOST_POWER
            if is_fit and (b != 0 or not isinstance(op, (ast.FloorDiv, ast.Mod))):
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
    raise GraphError(f"capture again: {text[:80]!r} cannot be evaluated at {dict(sizes)}")


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
    return _grows(node, least) and _value(node, least, "") >= 0  # rising: least at the least sizes


def names_in(node: ast.expr) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - _CALLS.keys()


_Interval = tuple[int, int]


def bounds_of(text: str, low: Mapping[str, int], high: Mapping[str, int]) -> _Interval:
    """Bounds of an expression where each size is from its `low` to its `high`, both included."""
    # Interval arithmetic (Moore 1966, Interval Analysis), exact where each size is named once.
    return _bounds(parsed(text), low, high, text)


def _bounds(node: ast.expr, low: Sizes, high: Sizes, text: str) -> _Interval:
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
            if (found := _BINARY_INTERVALS[type(op)](a, b)) is not None:
                return found
        case ast.Call(func=ast.Name(id=name), args=args) if name in _CALLS and args:
            each = [_bounds(arg, low, high, text) for arg in args]
            return _CALLS[name](one[0] for one in each), _CALLS[name](one[1] for one in each)
        case _:
            pass
    raise GraphError(f"capture again: {text[:80]!r} cannot be bounded over a range")


def _ends(of: Callable[[int, int], int], a: _Interval, b: _Interval) -> _Interval:
    found = [of(x, y) for x, y in itertools.product(a, b)]  # monotone in each: extremes are at ends
    return min(found), max(found)


def _remainder(a: _Interval, b: _Interval) -> _Interval | None:
    if b[0] <= 0:
        return None
    if b[0] == b[1] and a[0] // b[0] == a[1] // b[0]:  # one period: the remainder rises with it
        return a[0] % b[0], a[1] % b[0]
    return 0, b[1] - 1


def _power(a: _Interval, b: _Interval) -> _Interval | None:
    if b[0] != b[1] or not 0 <= b[0] <= _MOST_POWER:
        return None
    least, most = _ends(operator.pow, a, b)
    # An even power is 0 where its base is, inside of the interval.
    return (0 if a[0] < 0 < a[1] and b[0] % 2 == 0 and b[0] else least), most


_BINARY_INTERVALS: dict[type[ast.operator], Callable[[_Interval, _Interval], _Interval | None]] = {
    ast.Add: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    ast.Sub: lambda a, b: (a[0] - b[1], a[1] - b[0]),
    ast.Mult: lambda a, b: _ends(operator.mul, a, b),
    ast.FloorDiv: lambda a, b: None if b[0] <= 0 <= b[1] else _ends(operator.floordiv, a, b),
    ast.Mod: _remainder,
    ast.Pow: _power,
}


class SizeArgument(int):
    """A whole number. `text` says how it follows from the sizes."""

    text: str

    # With a default, as copies are made from the number alone.
    def __new__(cls, value: int, text: str = "") -> SizeArgument:
        made = super().__new__(cls, value)
        made.text = text
        return made


class FloatOfSizes(float):
    """A float. `text` is Python of sizes and of the functions that are `bound` to its names."""

    text: str  # operation by operation as the model's code, so that bits are eager's
    bound: dict[str, Any]

    def __new__(cls, value: float, text: str = "", bound: Any = None) -> FloatOfSizes:
        made = super().__new__(cls, value)
        made.text, made.bound = text, bound or {}
        return made


# By argument (its name, its position, or ``target``) and dimension: a name, or a tuple of it, the
# least size, the largest, and what sizes are multiples of: ``{"tokens": {1: ("seq", 16, 2048)}}``.
Dynamic = Mapping[str | int, Mapping[int, Any]]


class Symbol(msgspec.Struct, frozen=True):
    """A size that varies: `name`, from `low` to `high`, in steps of `multiple`."""

    name: str
    low: int
    high: int
    multiple: int = 1

    def __str__(self) -> str:
        steps = f" in steps of {self.multiple}" if self.multiple > 1 else ""
        return f"{self.name} from {self.low} to {self.high}{steps}"

    @property
    def sizes(self) -> range:
        return range(self.low, self.high + 1, self.multiple)

    @property
    def middle(self) -> int:
        """The size of the range that is next to the geometric middle."""
        steps = round(math.sqrt(self.low * self.high) / self.multiple)
        return min(max(steps * self.multiple, self.low), self.high)


class Place(msgspec.Struct, frozen=True):
    """Dimension `dim` of the leaf number `leaf` of a batch has the size of `symbol`."""

    leaf: int
    dim: int
    symbol: str


_NEAR = 64  # how far from the middle of a range, in steps, a size to trace with may lie
Sizes = Mapping[str, int]  # a size for each symbol, by name


def as_symbol(given: Any, where: str, size: int) -> Symbol:
    """Of one entry of ``dynamic=``; without a range, the largest is `size`, that of the batch."""
    entry: list[Any] = [*given] if isinstance(given, (tuple, list)) else [given]
    if len(entry) not in (1, 3, 4) or not isinstance(entry[0], str) or not entry[0].isidentifier():
        raise CaptureError(
            f"give dynamic of {where} a name, (name, least size, largest size) or (name, least, "
            f'largest, multiple), such as ("seq", 16, 2048): it is {given!r}'
        )
    numbers = entry[1:] if len(entry) > 1 else (2, size)
    if not all(type(number) is int for number in numbers):  # True is an int too
        raise CaptureError(f"dynamic of {where} is {given!r}: its sizes must be whole numbers")
    symbol = Symbol(entry[0], *numbers)
    _require_range(symbol, where)
    return symbol


def _require_range(symbol: Symbol, where: str) -> None:
    multiple = symbol.multiple
    if symbol.low < 2:
        raise CaptureError(
            f"begin the range at 2, and plan a size of 1 separately: {where} is to vary as "
            f"{symbol}, and torch runs other ops for sizes 0 and 1"
        )
    if symbol.high <= symbol.low or multiple < 1:
        raise CaptureError(f"{where} is to vary as {symbol}, which is not a range of sizes")
    # Torch's symbol counts steps, and it treats 0 and 1 of them as special too.
    if symbol.low % multiple or symbol.high % multiple or symbol.low < 2 * multiple:
        raise CaptureError(
            f"make both ends multiples of {multiple}, and the least size {2 * multiple} or more: "
            f"{where} is to vary as {symbol}"
        )


def require_one_range(symbols: Collection[Symbol]) -> tuple[Symbol, ...]:
    """The distinct ones, in order of first use; a name has one range."""
    found: dict[str, Symbol] = {}
    for symbol in symbols:
        if found.setdefault(symbol.name, symbol) != symbol:
            raise CaptureError(
                f"give one range to a name: dynamic has both {found[symbol.name]} and {symbol}"
            )
    return tuple(found.values())


def require_in_range(symbols: Sequence[Symbol], sizes: Sizes) -> dict[str, int]:
    """In the order of the symbols; refuses sizes that are missing, unknown or out of range."""
    if set(sizes) != {symbol.name for symbol in symbols}:
        wanted = ", ".join(f"{symbol.name}=..." for symbol in symbols)
        raise SignatureError(f"give {wanted}: sizes are {dict(sizes)}")
    for symbol in symbols:
        if sizes[symbol.name] not in symbol.sizes:
            raise SignatureError(
                f"capture a range that holds it: {symbol.name} = {sizes[symbol.name]} is outside "
                f"the captured range, {symbol}"
            )
    return {symbol.name: int(sizes[symbol.name]) for symbol in symbols}


def corner(symbols: Sequence[Symbol], which: str) -> dict[str, int]:
    """The point at which all symbols have their ``low``, ``middle`` or ``high`` size."""
    return {symbol.name: getattr(symbol, which) for symbol in symbols}


def spread(of: Sequence[_T], count: int) -> list[_T]:
    """So many of them at equal steps, both ends included; all, if there are no more."""
    places = {(len(of) - 1) * i // max(count - 1, 1) for i in range(max(count, 1))}
    return [of[place] for place in sorted(places)]


def number_of_points(symbols: Sequence[Symbol]) -> int:
    return math.prod(len(symbol.sizes) for symbol in symbols)


def points(symbols: Sequence[Symbol]) -> Iterator[dict[str, int]]:
    for sizes in itertools.product(*(symbol.sizes for symbol in symbols)):
        yield {symbol.name: size for symbol, size in zip(symbols, sizes, strict=True)}


def generic_sizes(symbols: Sequence[Symbol], fixed: Collection[int]) -> dict[str, int]:
    """Sizes to trace with: inside the ranges, and unlike each other and the sizes in `fixed`."""
    taken = set(fixed)  # two sizes that are equal by chance look as if one followed from the other
    found: dict[str, int] = {}
    for symbol in symbols:
        at = symbol.sizes.index(symbol.middle)
        near = symbol.sizes[max(at - _NEAR, 0) : at + _NEAR]
        found[symbol.name] = size = min(near, key=lambda n: _rank(n, symbol, taken))
        taken.add(size)
    return found


def _rank(size: int, symbol: Symbol, taken: Collection[int]) -> tuple[bool, bool, int, int]:
    steps = size // symbol.multiple
    # A prime has no factor in common with others, which would look so too.
    divisors = sum(steps % n == 0 for n in range(2, math.isqrt(steps) + 1))
    return size in taken, size in (symbol.low, symbol.high), divisors, abs(size - symbol.middle)


_MOST_POINTS = 20_000  # combinations of sizes that a guard is tried at; one with more is refused


class Guard(msgspec.Struct, frozen=True):
    """`text` must hold. `op` asked for it in `line`, each empty where unknown."""

    text: str
    op: str = ""
    line: str = ""

    def holds(self, sizes: Mapping[str, int]) -> bool:
        return bool(evaluated(self.text, sizes))


class RangeError(CaptureError):
    """A range holds sizes at which the model runs other ops."""

    symbol: str = ""  # whose range
    parts: tuple[tuple[int, int], ...] = ()  # the least and largest sizes that give one answer


def require_guards(guards: Sequence[Guard], symbols: Sequence[Symbol], model: str) -> None:
    """Raise `RangeError` for the first guard that does not hold at all sizes of the ranges."""
    for guard in guards:
        # A guard that fails somewhere would have another graph there, so the range is refused.
        used = [symbol for symbol in symbols if symbol.name in names_in(parsed(guard.text))]
        if number_of_points(used) > _MOST_POINTS:
            raise _range_error(guard, used[0], (), model, "cannot be tried at each size")
        if all(guard.holds(sizes) for sizes in points(used)):
            continue
        parts = _parts_of_range(guard, used[0], corner(used[1:], "middle"))
        raise _range_error(guard, used[0], parts, model, "does not hold at each size")


def _parts_of_range(guard: Guard, symbol: Symbol, others: Sizes) -> tuple[tuple[int, int], ...]:
    """Parts of the range without a gap in which the guard gives one answer, whichever it is."""
    grouped = itertools.groupby(symbol.sizes, lambda n: guard.holds({**others, symbol.name: n}))
    return tuple((sizes[0], sizes[-1]) for sizes in (list(each) for _, each in grouped))


def _range_error(
    guard: Guard, symbol: Symbol, parts: tuple[tuple[int, int], ...], model: str, why: str
) -> RangeError:
    who = guard.op or "the model's code"
    line = f" ({guard.line})" if guard.line else ""
    ways = " or ".join(f"{low} to {high}" for low, high in parts if high > low)
    if len(parts) > 4 or not ways or "%" in guard.text:
        ways = f"sizes for which {guard.text}, as multiples: (name, least, largest, multiple)"
    error = RangeError(
        f"capture with {symbol.name} of {ways}: {who}{line} of {model} chooses by {guard.text}, "
        f"which {why} of {symbol}, so one graph cannot serve them all"
    )
    error.symbol, error.parts = symbol.name, parts
    return error
