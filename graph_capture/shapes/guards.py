"""What a trace has asked of the sizes that vary: it holds for those that answer alike.

A guard that fails somewhere in the range would have another graph run there. Such a range is
refused where it is captured, with the op and the line that asked, and the parts that hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.shapes.expressions import evaluated, names_in, parsed
from remat.graph_capture.shapes.ranges import Symbol, corner, number_of_points, points

MOST_POINTS = 20_000
"""Combinations of sizes that a guard is tried at. Of more, those of two symbols at a time."""


class Guard(msgspec.Struct, frozen=True):
    """`text` must hold. `op` asked for it in `line`, each empty where unknown."""

    text: str
    op: str = ""
    line: str = ""

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it holds at these sizes."""
        return bool(evaluated(self.text, sizes))


class RangeError(CaptureError):
    """A range holds sizes at which the model runs other ops.

    Attributes
    ----------
    symbol : whose range. parts : of the range, those in which the guard holds throughout, as pairs
        of the least and the largest size.
    """

    symbol: str = ""
    parts: tuple[tuple[int, int], ...] = ()


def require_guards(guards: Sequence[Guard], symbols: Sequence[Symbol], model: str) -> None:
    """Raise `RangeError` for the first guard that does not hold at all sizes of the ranges."""
    for guard in guards:
        used = [symbol for symbol in symbols if symbol.name in names_in(parsed(guard.text))]
        if number_of_points(used) > MOST_POINTS:
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
