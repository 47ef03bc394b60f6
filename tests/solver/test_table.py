"""The table of solvers, its errors, and what importing it must not do."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from benchmarks.solver_table import header_of
from remat.compile.graph_context import CompileOptions
from remat.graph_capture.errors import SolverError
from remat.job.request import Request
from remat.solver import TABLE, make_solver, solve_within, solver_class
from remat.solver.stopping import DEFAULT_GAP
from remat.solver.table import NEEDS_LINKS, NO_OPTIONS
from tests.links import with_links
from tests.solver.graphs.random_graphs import chain


@pytest.mark.parametrize("name", TABLE)
def test_options_are_fields_of_a_frozen_dataclass(name: str) -> None:
    made = make_solver(name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.time_limit_s = 1.0  # type: ignore[attr-defined]
    header = header_of(name)
    assert all(word in header for word in ("Solves:", "Cost:", "Shortcomings:"))
    assert "time_limit_s, progress" not in header


def test_unknown_solver_names_the_near_and_all() -> None:
    with pytest.raises(SolverError) as caught:
        make_solver("chekmate")
    text = str(caught.value)
    assert "unknown solver 'chekmate': did you mean checkmate?" in text
    assert all(name in text for name in TABLE)


def test_unknown_option_lists_the_options() -> None:
    with pytest.raises(SolverError, match="no option 'gapp'; its options are gap, cuts"):
        make_solver("cut", gapp=1)


@pytest.mark.parametrize("name", ["cut", "checkmate", "store_all"])
def test_a_free_order_names_the_solvers_that_have_one(name: str) -> None:
    text = f"use solver auto, .* for order free: solver '{name}' keeps the given order"
    with pytest.raises(SolverError, match=text):
        make_solver(name, order="free")
    assert make_solver(name, order="fixed") == make_solver(name)
    assert make_solver("auto", order="free") != make_solver("auto")


@pytest.mark.parametrize(
    ("solver", "options", "text"),
    [
        ("checkmate", {"backend": "gurobi"}, "unknown MIP backend 'gurobi'; there are mathopt"),
        ("checkmate", {"passes": -1}, "passes must be 0"),
        ("chen_sqrt", {"segments": -1}, "segments must be 0"),
        ("cut", {"gap": -1}, "gap must be 0 or more, and finite, not -1"),
        ("cut", {"gap": math.nan}, "gap must be 0 or more, and finite, not nan"),
        ("cut", {"cuts": 0}, "cuts must be a whole number, 1 or more, not 0"),
        ("cut", {"cuts": 1.5}, "cuts must be a whole number, 1 or more, not 1.5"),
        ("auto", {"seed": -1}, "seed must be a whole number, 0 or more, at most 2147483647"),
        ("lp_rounding", {"seed": -1}, "seed must be a whole number, 0 or more"),
        ("retention", {"seed": 1 << 31}, "seed must be a whole number, 0 or more, at most"),
        ("retention", {"workers": 2.0}, "workers must be a whole number, 1 or more, not 2.0"),
        ("store_all", {"time_limit_s": -1}, "time_limit_s must be 0 or more, and finite, not -1"),
        ("dtr", {"time_limit_s": math.inf}, "time_limit_s must be 0 or more, and finite, not inf"),
    ],
)
def test_bad_option_values_say_what_to_do(
    solver: str, options: dict[str, object], text: str
) -> None:
    with pytest.raises(SolverError, match=text):
        make_solver(solver, **options)


OTHER_TEXTS = {"chen_greedy": "all", "every_n_layers": "uniform", "torch_knapsack": "greedy"}
"""Values of options that are texts, where the annotation does not list them."""


def other_values(name: str) -> dict[str, Any]:
    """Each option of a solver with a value that is not its default."""
    made, hints = solver_class(name), get_type_hints(solver_class(name))
    found: dict[str, Any] = {}
    for field in dataclasses.fields(made):
        choices = [c for c in get_args(hints[field.name]) if c != field.default]
        if isinstance(field.default, bool):
            found[field.name] = not field.default
        elif isinstance(field.default, str):
            found[field.name] = choices[0] if choices else OTHER_TEXTS[name]
        elif field.name not in NO_OPTIONS:
            found[field.name] = field.default + (1 if isinstance(field.default, int) else 0.01)
    return found


@pytest.mark.parametrize("name", TABLE)
def test_a_plan_records_every_option(name: str) -> None:
    asked = other_values(name)
    assert len(asked) == len(dataclasses.fields(solver_class(name))) - sum(
        field.name in NO_OPTIONS for field in dataclasses.fields(solver_class(name))
    )
    graph = with_links(chain(4)) if name in (*NEEDS_LINKS, "revolve") else chain(4)
    budget_bytes = solve_within(graph, 1 << 60, "store_all").peak_bytes
    schedule = solve_within(graph, budget_bytes, name, **asked).schedule
    assert schedule is not None
    assert schedule.options == asked


@pytest.mark.parametrize("budget", [math.nan, math.inf, 9.5, "8GiB", None])
def test_a_budget_is_a_whole_number_of_bytes(budget: Any) -> None:
    with pytest.raises(SolverError, match=f"to a whole number, .*: it is {budget!r}"):
        solve_within(chain(4), budget)
    assert solve_within(chain(4), np.int64(1 << 60)).status == "optimal"


@pytest.mark.parametrize("time_limit_s", [math.nan, math.inf, -0.1])
def test_a_time_limit_is_finite(time_limit_s: float) -> None:
    with pytest.raises(SolverError, match=f"and finite, not {time_limit_s}"):
        solve_within(chain(4), 1 << 60, time_limit_s=time_limit_s)
    with pytest.raises(SolverError, match=f"and finite, not {time_limit_s}"):
        solve_within(chain(4), 1 << 60, time_limit_s=time_limit_s, recompute="*")


def test_solving_imports_neither_torch_nor_highspy() -> None:
    code = (
        "import sys, remat.solver\n"
        "assert 'torch' not in sys.modules\n"
        "for name in remat.solver.TABLE: remat.solver.solver_class(name)\n"
        "import remat.solver.backends.mip as mip\n"
        "program = mip.MixedProgram(); program.variable(1.0)\n"
        "mip.solve_program(program, mip.Limits())\n"
        "there = mip.run_in_process(eval, \"list(__import__('sys').modules)\")\n"
        "assert 'ortools.math_opt' in there\n"
        "assert not {'torch', 'highspy'} & {*sys.modules, *there}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_progress_tells_bound_and_best() -> None:
    heard = []
    graph = chain(12)
    peak_bytes = solve_within(graph, 1 << 60, "store_all").peak_bytes
    result = solve_within(graph, peak_bytes // 2, "cut", progress=heard.append)
    assert heard
    assert heard[-1].bound_overhead <= result.overhead + 1e-9
    assert all(a.seconds <= b.seconds for a, b in pairwise(heard))


def test_one_gap_is_the_default_of_all_that_prove_one() -> None:
    made = {name: make_solver(name) for name in ("auto", "cut", "joint")}
    assert {one.gap for one in made.values()} == {DEFAULT_GAP}  # type: ignore[attr-defined]
    assert Request().gap == CompileOptions(budget="60%").gap == DEFAULT_GAP


def test_a_solver_that_proves_no_bound_takes_any_gap() -> None:
    assert make_solver("chen_sqrt", gap=0.5) == make_solver("chen_sqrt")
    with pytest.raises(SolverError, match="gap must be 0 or more, and finite, not -1"):
        make_solver("chen_sqrt", gap=-1)
