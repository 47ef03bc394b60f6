"""Which dimensions of a batch vary, and over which sizes: what ``dynamic=`` says.

``{"tokens": {1: ("seq", 16, 2048)}}`` lets dimension 1 of the argument ``tokens`` be any size from
16 to 2048, by the name of ``seq``. A fourth entry says what sizes are multiples of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from remat.graph_capture.errors import CaptureError, SignatureError
from remat.graph_capture.sizes.expressions import evaluated, names_in, parsed

Dynamic = Mapping[str | int, Mapping[int, Any]]
"""By argument (its name, its position, or ``target``): by dimension, a name, or a tuple of a name,
the least size, the largest one and, if need be, what all sizes are multiples of."""


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


_NEAR = 64
"""How far from the middle of a range, in steps, a size to trace with may lie."""
Sizes = Mapping[str, int]
"""A size for each symbol, by name."""


def as_symbol(given: Any, where: str, size: int) -> Symbol:
    """Of one entry of ``dynamic=``; without a range, the largest is `size`, that of the batch."""
    entry: list[Any] = [*given] if isinstance(given, (tuple, list)) else [given]
    if len(entry) not in (1, 3, 4) or not isinstance(entry[0], str) or not entry[0].isidentifier():
        raise CaptureError(
            f"dynamic of {where} is {given!r}: give a name, or (name, least size, largest size) or "
            '(name, least, largest, multiple), such as ("seq", 16, 2048)'
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
            f"{where} is to vary as {symbol}: torch runs other ops for sizes of 0 and 1, so that a "
            "range begins at 2. Plan a size of 1 by itself"
        )
    if symbol.high <= symbol.low or multiple < 1:
        raise CaptureError(f"{where} is to vary as {symbol}, which is no range of sizes")
    # Torch's symbol counts steps, and it treats 0 and 1 of them as special too.
    if symbol.low % multiple or symbol.high % multiple or symbol.low < 2 * multiple:
        raise CaptureError(
            f"{where} is to vary as {symbol}: both ends must be multiples of {multiple}, and the "
            f"least size {2 * multiple} or more"
        )


def require_one_range(symbols: Collection[Symbol]) -> tuple[Symbol, ...]:
    """The distinct ones, in order of first use; a name has one range."""
    found: dict[str, Symbol] = {}
    for symbol in symbols:
        if found.setdefault(symbol.name, symbol) != symbol:
            raise CaptureError(
                f"dynamic has both {found[symbol.name]} and {symbol}: give one range to a name"
            )
    return tuple(found.values())


def require_in_range(symbols: Sequence[Symbol], sizes: Sizes) -> dict[str, int]:
    """In the order of the symbols; refuses sizes that are missing, unknown or out of range."""
    unknown = set(sizes) - {symbol.name for symbol in symbols}
    missing = [symbol.name for symbol in symbols if symbol.name not in sizes]
    if unknown or missing:
        given = ", ".join(f"{name}=..." for name in (symbol.name for symbol in symbols))
        raise SignatureError(f"sizes are given as {dict(sizes)}: give {given}")
    for symbol in symbols:
        if sizes[symbol.name] not in symbol.sizes:
            raise SignatureError(
                f"{symbol.name} = {sizes[symbol.name]} is out of the range that was captured, "
                f"{symbol}: capture with a range that holds it"
            )
    return {symbol.name: int(sizes[symbol.name]) for symbol in symbols}


def corner(symbols: Sequence[Symbol], which: str) -> dict[str, int]:
    """The point at which all symbols have their ``low``, ``middle`` or ``high`` size."""
    return {symbol.name: getattr(symbol, which) for symbol in symbols}


def spread(symbol: Symbol, most: int) -> list[int]:
    """Sizes of a symbol from the least to the largest: all of them, or `most` at equal steps."""
    last = len(symbol.sizes) - 1
    if last < most:
        return list(symbol.sizes)
    return [symbol.sizes[last * i // (most - 1)] for i in range(most)]


def number_of_points(symbols: Sequence[Symbol]) -> int:
    return math.prod(len(symbol.sizes) for symbol in symbols)


def points(symbols: Sequence[Symbol]) -> Iterator[dict[str, int]]:
    names = [symbol.name for symbol in symbols]
    for sizes in itertools.product(*(symbol.sizes for symbol in symbols)):
        yield dict(zip(names, sizes, strict=True))


def generic_sizes(symbols: Sequence[Symbol], fixed: Collection[int]) -> dict[str, int]:
    """Sizes to trace with: inside the ranges, and unlike each other and the sizes in `fixed`."""
    # Two sizes that are equal by chance look as if one followed from the other.
    taken = set(fixed)
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
    is_end = size in (symbol.low, symbol.high)
    return size in taken, is_end, divisors, abs(size - symbol.middle)


_MOST_POINTS = 20_000
"""Combinations of sizes that a guard is tried at; one with more is refused."""


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
    # Of the range, those in which the guard gives one answer: the least and the largest size.
    parts: tuple[tuple[int, int], ...] = ()


def require_guards(guards: Sequence[Guard], symbols: Sequence[Symbol], model: str) -> None:
    """Raise `RangeError` for the first guard that does not hold at all sizes of the ranges."""
    for guard in guards:
        # A guard that fails somewhere in the range would have another graph run there, so the range
        # is refused where it is captured.
        used = [symbol for symbol in symbols if symbol.name in names_in(parsed(guard.text))]
        if number_of_points(used) > _MOST_POINTS:
            raise _range_error(guard, used[0], (), model, "cannot be tried at each size")
        if all(guard.holds(sizes) for sizes in points(used)):
            continue
        parts = _parts_of_range(guard, used[0], corner(used[1:], "middle"))
        raise _range_error(guard, used[0], parts, model, "does not hold at each size")


def _parts_of_range(
    guard: Guard, symbol: Symbol, others: Mapping[str, int]
) -> tuple[tuple[int, int], ...]:
    """Parts of the range without a gap in which the guard gives one answer, whichever it is."""
    parts: list[tuple[int, int]] = []
    before: bool | None = None
    for size in symbol.sizes:
        now = guard.holds({**others, symbol.name: size})
        if now is before:
            parts[-1] = parts[-1][0], size
        else:
            parts.append((size, size))
        before = now
    return tuple(parts)


def _range_error(
    guard: Guard, symbol: Symbol, parts: tuple[tuple[int, int], ...], model: str, why: str
) -> RangeError:
    who = guard.op or "the model's code"
    line = f" ({guard.line})" if guard.line else ""
    ways = " or ".join(f"{low} to {high}" for low, high in parts if high > low)
    if len(parts) > 4 or not ways or "%" in guard.text:
        ways = f"sizes for which {guard.text}, as by a multiple: (name, least, largest, multiple)"
    error = RangeError(
        f"{who}{line} of {model} chooses by {guard.text}, which {why} of {symbol}, so that one "
        f"graph cannot serve them all. Capture with {symbol.name} of {ways}"
    )
    error.symbol, error.parts = symbol.name, parts
    return error
