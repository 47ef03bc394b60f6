"""The options of a solver: what a plan records of them, and rules for those that many share."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any, SupportsIndex, cast

import numpy as np

from remat.graph_capture.errors import SolverError
from remat.schedules.schedule import Option

INTEGER = (int, np.integer)
REAL = (int, float, np.integer, np.floating)
MOST_SEED = (1 << 31) - 1
"""CP-SAT takes no larger one."""
WHOLE: dict[str, tuple[int, float]] = {
    "cuts": (1, math.inf),
    "seed": (0, MOST_SEED),
    "workers": (1, math.inf),
}
"""Least and most of options that are whole numbers."""
NO_OPTIONS = ("time_limit_s", "progress", "known_us")
"""Fields of a solver that are no options of a plan: they say how to search, not for what."""
NUMBERS = ("gap", "time_limit_s")
"""Options that are finite numbers from 0 on."""


def check_options(solver: Any) -> None:
    """Raise `SolverError` where an option that many solvers share has no meaning."""
    for option in dataclasses.fields(solver):
        value = getattr(solver, option.name)
        if option.name in WHOLE:
            _check_whole(option.name, value, *WHOLE[option.name])
        elif option.name in NUMBERS:
            check_number(option.name, value)


def options_of(solver: Any) -> dict[str, Option]:
    """The options of `solver`, a dataclass, as a plan records them."""
    return {
        field.name: getattr(solver, field.name)
        for field in dataclasses.fields(solver)
        if field.name not in NO_OPTIONS
    }


def check_number(name: str, value: Any) -> None:
    """Raise `SolverError` unless `value` is a finite number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, REAL) or not 0 <= value < math.inf:
        raise SolverError(f"{name} must be 0 or more, and finite, not {value!r}")


def whole_bytes(budget_bytes: object) -> int:
    """The budget as an int.

    Raises
    ------
    SolverError : it is none.
    """
    try:
        return operator.index(cast("SupportsIndex", budget_bytes))
    except TypeError:
        raise SolverError(
            f"budget_bytes must be a whole number of bytes, not {budget_bytes!r}: "
            "round it down, or give a text such as '8GiB' to remat.solve"
        ) from None


def _check_whole(name: str, value: Any, least: int, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, INTEGER) or not least <= value <= most:
        upper = f", at most {most}" if most < math.inf else ""
        raise SolverError(f"{name} must be a whole number, {least} or more{upper}, not {value}")
