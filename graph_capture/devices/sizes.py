"""How a number of bytes is written: `8GiB`, `1.5GB`, or an int."""

from __future__ import annotations

import operator
import re
from typing import SupportsIndex

from remat.graph_capture.errors import BudgetError

UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
NUMBER = r"([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)"


def whole_bytes(given: SupportsIndex, what: str, forms: str) -> int:
    """An int as bytes.

    Parameters
    ----------
    what : the name of what is given, such as ``budget``. forms : how it may be written.

    Raises
    ------
    BudgetError : it is no int.
    """
    if isinstance(given, bool):
        raise BudgetError(f"{what} {given!r} is no size: give bytes as an int, or {forms}")
    try:
        return operator.index(given)
    except TypeError as error:
        raise BudgetError(
            f"{what} {given!r} is a {type(given).__name__}: give whole bytes as an int, "
            f"or a text such as {forms}"
        ) from error


def written_bytes(text: str, what: str, forms: str, unless: str = "") -> int:
    """A text with a unit as bytes.

    Parameters
    ----------
    unless : what the number could have meant without a unit, such as ``%``; else empty.

    Raises
    ------
    BudgetError : it is no number, or has no unit or an unknown one.
    """
    match = re.fullmatch(rf"{NUMBER}\s*([a-z]*)", text.lower())
    if match is None:
        raise BudgetError(f"{what} {text!r} cannot be read: write it like {forms}")
    number, unit = match.groups()
    if not unit:
        others = f"{number}{unless}, " if unless else ""
        raise BudgetError(
            f"{what} {text!r} has no unit: {number} bytes? Write {others}{number}MiB or {number}GiB"
        )
    if unit not in UNITS:
        raise BudgetError(
            f"{what} {text!r} has an unknown unit {unit!r}: write {number}MiB or {number}GiB "
            f"(units: B, kB, MB, GB, KiB, MiB, GiB)"
        )
    return int(float(number) * UNITS[unit])
