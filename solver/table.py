"""The table of solvers: a name, and where its class is."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import math
import operator
import re
import sys
from typing import Any, Protocol, SupportsIndex, cast

import numpy as np

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Result
from remat.schedules.schedule import Option


class Solver(Protocol):
    """What every class named in `TABLE` is: a frozen dataclass of options with one method.

    `tests/solver/test_contract.py` and the tests beside it hold every solver of the table to
    what follows. A `Search` (`remat.solver.search`) keeps most of it for its user: it takes the
    options and the limit from the solver, judges, remembers the best, hears Ctrl-C and makes
    the `Result`.

    Budget
        A schedule that is returned has a true peak, that of `simulate`, resident bytes
        included, of at most `budget_bytes`. A model of memory may guide the search; it never
        decides what is returned. `status` is ``optimal`` exactly where time equals the bound.
    Bound
        No schedule within the budget, with first computations in the order of the graph as it
        is given and any number of recomputations, takes less than `lower_bound_us`. With the
        option ``order="free"``, none in any order does. What is proved for fewer schedules, as
        for those that run no op three times, is said in `message` and nowhere else. A solver
        that proves nothing gives the time of every op once.
    Time limit
        `time_limit_s` is wall clock. Where it ends the search, the best schedule found is
        returned, with status ``time limit`` unless it is proved optimal. Overruns are those
        of one step that cannot be divided, a second or two. A limit of 0 is allowed.
    Ctrl-C
        A `KeyboardInterrupt` ends the search as the time limit does, at once: the best found
        is returned, and `message` begins with ``interrupted``. Calls into C++, which would
        keep Ctrl-C waiting, run in a `Task` or by `run_in_process` (`remat.solver.backends`).
    Determinism
        The same graph, budget, options, seed and number of workers give the same schedule in
        any process, unless the limit or Ctrl-C ended the search. So efforts are counted in
        what no clock moves (`remat.solver.stopping`), and nothing iterates over a set of
        objects. `retention` with several workers is the one exception.
    Options
        They are the fields of the dataclass, each with a default: numbers, texts or bools.
        They are keyword arguments of `remat.solver.solve_within`. `Schedule.options` records every
        one, so that the same can be asked again.
        ``__post_init__`` refuses a value without meaning by a `SolverError` that says which
        values have one. Some fields are no options of a plan: `time_limit_s`, in seconds;
        `progress`, which is called with a `Progress` now and then; and `known_us` of a solver
        that can end where it is proved to find nothing better than that.
    What does not fit
        That nothing fits is a `Result`, no error: without a schedule, with status
        ``infeasible``, the least budget known to be feasible and the schedule for it. That
        budget does not depend on the one that was asked for, so a solve at it finds a schedule.
        Where the clock ended the search before anything was found, the status is
        ``time limit``: nothing is then said about the budget.
    """

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The best schedule found whose true peak is within `budget_bytes`, and a bound.

        The order of the graph's ops is that of first computations. The budget is on the peak,
        resident bytes included, and may be any int. SolverError: the solver refuses the graph, as
        `exhaustive` refuses large ones.
        """
        ...


_INTEGER = (int, np.integer)
REAL = (int, float, np.integer, np.floating)
_MOST_SEED = (1 << 31) - 1  # CP-SAT takes no larger one
_WHOLE: dict[str, tuple[int, float]] = {
    "cuts": (1, math.inf),
    "seed": (0, _MOST_SEED),
    "workers": (1, math.inf),
}
"""Least and most of options that are whole numbers."""
NO_OPTIONS = ("time_limit_s", "progress", "known_us")
"""Fields of a solver that are no options of a plan: they say how to search, not for what."""
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
        # NumPy's integers pass, floats do not: which whole number was meant is not ours to say.
        return operator.index(cast("SupportsIndex", budget_bytes))
    except TypeError:
        raise SolverError(
            f"budget_bytes must be a whole number of bytes, not {budget_bytes!r}: "
            "round it down, or give a text such as '8GiB' to remat.solve"
        ) from None


TABLE: dict[str, str] = {
    "auto": "remat.solver.auto:Auto",
    "cut": "remat.solver.cuts.cut:Cut",
    "joint": "remat.solver.offload.joint:JointOffload",
    "hierarchical": "remat.solver.blocks.hierarchical:Hierarchical",
    "checkmate": "remat.solver.exact.checkmate:Checkmate",
    "retention": "remat.baselines.retention:Retention",
    "rotor": "remat.baselines.rotor:Rotor",
    "revolve": "remat.baselines.revolve:Revolve",
    "chen_greedy": "remat.baselines.hand_written_rules:ChenGreedy",
    "chen_sqrt": "remat.solver.segments.chen_sqrt:ChenSqrt",
    "lower_set": "remat.solver.segments.lower_set:LowerSet",
    "lp_rounding": "remat.baselines.lp_rounding:LpRounding",
    "dtr": "remat.solver.policies.policies:Dtr",
    "lru": "remat.baselines.evictions:Lru",
    "largest": "remat.solver.policies.policies:Largest",
    "msps": "remat.solver.policies.policies:Msps",
    "dte": "remat.baselines.evictions:Dte",
    "coop": "remat.baselines.evictions:Coop",
    "store_all": "remat.solver.policies.template:StoreAll",
    "full": "remat.baselines.hand_written_rules:Full",
    "every_n_layers": "remat.solver.policies.template:EveryNLayers",
    "selective": "remat.baselines.hand_written_rules:Selective",
    "keep_attention_output": "remat.baselines.hand_written_rules:KeepAttentionOutput",
    "norms_and_activations": "remat.baselines.hand_written_rules:NormsAndActivations",
    "torch_knapsack": "remat.baselines.torch_budget:TorchKnapsack",
    "swap_all": "remat.baselines.offload_policies:SwapAll",
    "delta": "remat.baselines.offload_policies:Delta",
    "layer_fractions": "remat.baselines.layer_fractions:LayerFractions",
    "fraction": "remat.baselines.offload_policies:Fraction",
    "exhaustive": "remat.solver.exact.exhaustive:Exhaustive",
}
NEEDS_LINKS = ("swap_all", "delta", "layer_fractions", "fraction")
"""Solvers that refuse a graph from which nothing may leave the device."""

TAKE_CHUNKS = ("auto", "cut", "joint", "hierarchical", "retention", "exhaustive")
"""Solvers that plan regions in chunks. The others are rules by hand and published methods: they see
the captured step alone, as people write them and as their papers have them."""


def solver_class(name: str) -> type[Any]:
    """The dataclass behind a name of `TABLE`; SolverError if there is none."""
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SolverError(f"a solver is named by a text such as 'auto', not by {name!r}")
    if name not in TABLE:
        near = difflib.get_close_matches(name, TABLE, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise SolverError(f"unknown solver '{name}': {hint}Solvers are {', '.join(TABLE)}")
    module, _, attribute = TABLE[name].partition(":")
    return cast("type[Any]", getattr(importlib.import_module(module), attribute))


def plans_copies(solver: str) -> bool:
    return getattr(solver_class(solver), "copies", False)


def header_of(name: str) -> str:
    made = solver_class(name)
    own = inspect.cleandoc(made.__doc__ or "")
    # Solvers that share a file say what they are at their classes.
    if "Solves:" not in own:
        return inspect.cleandoc(sys.modules[made.__module__].__doc__ or "")
    return re.split(r"\n\nAttributes\n-+\n", own)[0]


def option_names(name: str) -> list[str]:
    return [field.name for field in dataclasses.fields(solver_class(name))]


def make_solver(name: str, **options: object) -> Solver:
    """Raises SolverError: no such solver, or it has no such option, or not of that value."""
    known = option_names(name)
    # Fixed is the order of every solver that does not choose one.
    if "order" not in known and options.get("order") == "fixed":
        del options["order"]
    # A gap allows an early stop, so a solver that proves no bound takes any.
    if "gap" not in known and "gap" in options:
        check_number("gap", options.pop("gap"))
    for option in options:
        if option == "order" and option not in known:
            raise SolverError(
                f"solver '{name}' keeps the given order of first computations: for order "
                f"{options[option]} use solver auto, or exhaustive for a few ops"
            )
        if option not in known:
            raise SolverError(
                f"solver '{name}' has no option '{option}'; its options are {', '.join(known)}"
            )
    solver = solver_class(name)(**options)
    _check_options(solver)
    return cast("Solver", solver)
