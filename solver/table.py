"""The table of solvers: a name, and where its class is."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from typing import Any, cast

from remat.graph_capture.errors import SolverError
from remat.solver.contract import Solver
from remat.solver.options import check_number, check_options

TABLE: dict[str, str] = {
    "auto": "remat.solver.auto:Auto",
    "cut": "remat.solver.cuts.cut:Cut",
    "joint": "remat.solver.offload.joint:Joint",
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
    "swap_all": "remat.solver.offload.swap_all:SwapAll",
    "delta": "remat.solver.offload.delta:Delta",
    "layer_fractions": "remat.solver.offload.layer_fractions:LayerFractions",
    "fraction": "remat.solver.offload.fraction:Fraction",
    "exhaustive": "remat.solver.exact.exhaustive:Exhaustive",
}
NEEDS_LINKS = ("swap_all", "delta", "layer_fractions", "fraction")
"""Solvers that refuse a graph from which nothing may leave the device."""

TAKE_PIECES = ("auto", "cut", "joint", "hierarchical", "retention", "exhaustive")
"""Solvers that plan regions in pieces. The others are rules by hand and published methods: they see
the captured step alone, as people write them and as their papers have them."""


def solver_class(name: str) -> type[Any]:
    """The class behind a name of `TABLE`; its dataclass fields are the options.

    Raises
    ------
    SolverError : there is no such solver.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SolverError(f"a solver is named by a text such as 'auto', not by {name!r}")
    if name not in TABLE:
        near = difflib.get_close_matches(name, TABLE, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise SolverError(f"unknown solver '{name}': {hint}Solvers are {', '.join(TABLE)}")
    module, _, attribute = TABLE[name].partition(":")
    return cast("type[Any]", getattr(importlib.import_module(module), attribute))


def option_names(name: str) -> list[str]:
    """The names of that solver's options.

    Raises
    ------
    SolverError : no such solver.
    """
    return [field.name for field in dataclasses.fields(solver_class(name))]


def make_solver(name: str, **options: object) -> Solver:
    """The solver of that name with those options.

    The option `order`, of `auto` and `exhaustive`, may be ``fixed`` for every solver. A `gap`
    allows a solver to stop early, so one that proves no bound takes any.

    Raises
    ------
    SolverError : no such solver, or it has no such option, or not of that value.
    """
    known = option_names(name)
    if "order" not in known and options.get("order") == "fixed":
        del options["order"]
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
    check_options(solver)
    return cast("Solver", solver)
