"""The table of solvers: a name, and where its class is."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
from pathlib import Path
from typing import Any, Protocol, SupportsIndex, cast

import msgspec
import numpy as np

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.levers import attribute_at
from remat.schedules.outcome import Result
from remat.schedules.schedule import Option


class Solver(Protocol):
    """What every class named in `TABLE` is: a frozen dataclass of options with one method.

    The tests beside `tests/solver/test_contract.py` hold every solver to this; a `Search` keeps
    most of it for its user.

    - A schedule that is returned has a true peak, that of `simulate`, within the budget. A model of
      memory may guide the search but never decides. It is ``optimal`` where time equals the bound.
    - No schedule within the budget, of the given order of first computations (any order with
      ``order="free"``), takes less than `lower_bound_us`. What is proved for fewer schedules is
      said in `message` alone. A solver that proves nothing gives the time of every op once.
    - `time_limit_s`, 0 or more, is wall clock: the best found is returned, as ``time limit`` unless
      proved optimal, late by a second or two at most.
    - Ctrl-C ends the search as the limit does, at once; `message` then begins with ``interrupted``.
      Calls into C++, which would keep Ctrl-C waiting, run in a `Task` or by `run_in_process`.
    - The same graph, budget, options, seed and workers give the same schedule in any process,
      unless limit or Ctrl-C ended the search. So nothing iterates over a set of objects, and
      efforts are counted in what no clock moves. `retention` with several workers is the exception.
    - Options are the fields, each with a default. `Schedule.options` records them, apart from
      `NO_OPTIONS`. ``__post_init__`` raises `SolverError` for a value without meaning.
    - That nothing fits is no error but a result, ``infeasible`` where that is proved and otherwise
      ``none found``, with the least budget known and its schedule. That budget does not depend on
      the one asked for: a solve at it finds a schedule. Where the clock came first, the status is
      ``time limit``: nothing is said about the budget.
    """

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The best schedule found, and a bound; SolverError where it refuses the graph. The budget
        is on the peak, resident bytes included, and may be any int."""
        ...


_INTEGER = (int, np.integer)
REAL = (int, float, np.integer, np.floating)
_MOST_SEED = (1 << 31) - 1  # CP-SAT takes no larger one
_WHOLE: dict[str, tuple[int, float]] = {  # least and most of options that are whole numbers
    "cuts": (1, math.inf),
    "seed": (0, _MOST_SEED),
    "workers": (1, math.inf),
}
NO_OPTIONS = ("time_limit_s", "progress", "known_us")  # fields that say how to search, not for what
_NUMBERS = ("gap", "time_limit_s")  # options that are finite numbers from 0 on


def _check_options(solver: Any) -> None:
    for option in dataclasses.fields(solver):
        value = getattr(solver, option.name)
        if option.name in _NUMBERS:
            check_number(option.name, value)
        elif option.name in _WHOLE:
            least, most = _WHOLE[option.name]
            is_whole = isinstance(value, _INTEGER) and not isinstance(value, bool)
            if not is_whole or not least <= value <= most:
                upper = f", at most {most}" if most < math.inf else ""
                raise SolverError(
                    f"{option.name} must be a whole number, {least} or more{upper}, not {value}"
                )


def options_of(solver: Any) -> dict[str, Option]:
    return {
        field.name: getattr(solver, field.name)
        for field in dataclasses.fields(solver)
        if field.name not in NO_OPTIONS
    }


def check_number(name: str, value: Any) -> None:
    # To Python, a bool is an int.
    if isinstance(value, bool) or not isinstance(value, REAL) or not 0 <= value < math.inf:
        raise SolverError(f"{name} must be 0 or more, and finite, not {value!r}")


def budget_as_int(budget_bytes: object) -> int:
    try:
        # Which whole number a float means is not ours to say.
        return operator.index(cast("SupportsIndex", budget_bytes))
    except TypeError:
        raise SolverError(
            "round budget_bytes to a whole number, or pass '8GiB' or the like to remat.solve: it "
            f"is {budget_bytes!r}"
        ) from None


TABLE: dict[str, str] = msgspec.json.decode(Path(__file__).with_name("solvers.json").read_bytes())
# They refuse a graph from which nothing may leave the device.
NEEDS_LINKS = ("swap_all", "delta", "layer_fractions", "fraction")

TAKE_CHUNKS = ("auto", "cut", "joint", "hierarchical", "retention", "exhaustive")
"""Solvers that plan regions in chunks. Others, as their papers have them, see the captured step."""


def solver_class(name: str) -> type[Any]:
    """The dataclass behind a name of `TABLE`; SolverError if there is none."""
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SolverError(f"name a solver with a string such as 'auto', not {name!r}")
    if name not in TABLE:
        near = difflib.get_close_matches(name, TABLE, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise SolverError(f"unknown solver '{name}': {hint}choose one of {', '.join(TABLE)}")
    return attribute_at(TABLE[name])


def plans_copies(solver: str) -> bool:
    return getattr(solver_class(solver), "copies", False)


def option_names(name: str) -> list[str]:
    return [field.name for field in dataclasses.fields(solver_class(name))]


def make_solver(name: str, **options: object) -> Solver:
    """SolverError: no such solver, or no such option or value."""
    known = option_names(name)
    # Fixed is the order of every solver that does not choose one.
    if "order" not in known and options.get("order") == "fixed":
        del options["order"]
    if "gap" not in known and "gap" in options:  # a solver that proves no bound takes any gap
        check_number("gap", options.pop("gap"))
    for option in options:
        if option == "order" and option not in known:
            raise SolverError(
                f"use solver auto, or exhaustive for a few ops, for order {options[option]}: "
                f"solver '{name}' keeps the given order of first computations"
            )
        if option not in known:
            raise SolverError(
                f"solver '{name}' has no option '{option}'; its options are {', '.join(known)}"
            )
    solver = solver_class(name)(**options)
    _check_options(solver)
    return cast("Solver", solver)
