"""Solvers: a training graph and a budget in, a schedule and a proven bound out. No torch.

A solver is one file with a frozen dataclass whose fields are its options, and one row of
`TABLE`; it is imported when first asked for.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from typing import Any, Protocol, cast

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.solver.options import check_number, check_options, whole_bytes
from remat.solver.pins.globs import Globs
from remat.solver.result import Holding, Result
from remat.solver.search import Listener, Progress

__all__ = [
    "TABLE",
    "Globs",
    "Holding",
    "Progress",
    "Result",
    "Solver",
    "make_solver",
    "solve",
    "solver_class",
]

TABLE: dict[str, str] = {
    "auto": "remat.solver.auto:Auto",
    "cut": "remat.solver.cuts.cut:Cut",
    "hierarchical": "remat.solver.blocks.hierarchical:Hierarchical",
    "checkmate": "remat.solver.exact.checkmate:Checkmate",
    "retention": "remat.solver.exact.retention:Retention",
    "rotor": "remat.solver.chains.rotor:Rotor",
    "revolve": "remat.solver.chains.revolve:Revolve",
    "chen_greedy": "remat.solver.segments.chen_greedy:ChenGreedy",
    "chen_sqrt": "remat.solver.segments.chen_sqrt:ChenSqrt",
    "lower_set": "remat.solver.segments.lower_set:LowerSet",
    "lp_rounding": "remat.solver.exact.lp_rounding:LpRounding",
    "dtr": "remat.solver.policies.dtr:Dtr",
    "lru": "remat.solver.policies.lru:Lru",
    "largest": "remat.solver.policies.largest:Largest",
    "msps": "remat.solver.policies.msps:Msps",
    "dte": "remat.solver.policies.dte:Dte",
    "coop": "remat.solver.policies.coop:Coop",
    "store_all": "remat.solver.store_all:StoreAll",
    "full": "remat.solver.templates.full:Full",
    "every_n_layers": "remat.solver.templates.every_n_layers:EveryNLayers",
    "selective": "remat.solver.templates.selective:Selective",
    "keep_attention_output": "remat.solver.templates.keep_attention_output:KeepAttentionOutput",
    "norms_and_activations": "remat.solver.templates.norms_and_activations:NormsAndActivations",
    "torch_knapsack": "remat.solver.templates.torch_knapsack:TorchKnapsack",
    "exhaustive": "remat.solver.exact.exhaustive:Exhaustive",
}


class Solver(Protocol):
    """What every class named in `TABLE` offers."""

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        """The best schedule found whose true peak is within `budget_bytes`, and a bound."""
        ...


def solver_class(name: str) -> type[Any]:
    """The class behind a name of `TABLE`; its dataclass fields are the options.

    Raises
    ------
    SolverError : there is no such solver.
    """
    if name not in TABLE:
        near = difflib.get_close_matches(name, TABLE, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise SolverError(f"unknown solver '{name}': {hint}Solvers are {', '.join(TABLE)}")
    module, _, attribute = TABLE[name].partition(":")
    return cast("type[Any]", getattr(importlib.import_module(module), attribute))


def make_solver(name: str, **options: object) -> Solver:
    """The solver of that name with those options.

    The option `order`, of `auto` and `exhaustive`, may be ``fixed`` for every solver.

    Raises
    ------
    SolverError : no such solver, or it has no such option, or not of that value.
    """
    made = solver_class(name)
    known = [field.name for field in dataclasses.fields(made)]
    if "order" not in known and options.get("order") == "fixed":
        del options["order"]
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
    solver = made(**options)
    check_options(solver)
    return cast("Solver", solver)


def solve(
    graph: TrainingGraph,
    budget_bytes: int,
    solver: str = "auto",
    *,
    time_limit_s: float = 60.0,
    progress: Listener | None = None,
    keep: Globs = (),
    recompute: Globs = (),
    **options: object,
) -> Result:
    """Find the schedule of least time whose true peak is within `budget_bytes`.

    Parameters
    ----------
    graph : TrainingGraph
        One training step.
    budget_bytes : int
        On the peak, resident bytes included.
    solver : str
        A name of `TABLE`.
    time_limit_s : float
        The best schedule found by then is returned, with status ``time limit`` if that
        cut the search short.
    progress : callable
        Called with a `Progress` now and then.
    keep, recompute : globs
        Over module paths: forward ops there are never recomputed, or what backward reads of
        them is not carried from forward into backward; see `remat.solver.pins.pinned`.
    **options : object
        Fields of the solver.

    Raises
    ------
    SolverError : unknown solver or option, a value or budget without meaning, or a glob that
        matches nothing or is pinned both ways. That nothing fits is a `Result`, no error.
    """
    budget_bytes = whole_bytes(budget_bytes)
    check_number("time_limit_s", time_limit_s)
    if keep or recompute:
        from remat.solver.pins.pinned import solve_pinned

        return solve_pinned(
            graph, budget_bytes, solver, keep, recompute,
            time_limit_s=time_limit_s, progress=progress, **options,
        )  # fmt: skip
    made = make_solver(solver, time_limit_s=time_limit_s, progress=progress, **options)
    return made.solve(graph, budget_bytes)
