"""The table of solvers, its errors, and what importing it must not do."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from itertools import pairwise

import pytest

from remat.graph_capture.errors import SolverError
from remat.solver import TABLE, make_solver, solve, solver_class
from tests.solver.random_graphs import chain


@pytest.mark.parametrize("name", TABLE)
def test_options_are_fields_of_a_frozen_dataclass(name: str) -> None:
    made = make_solver(name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.time_limit_s = 1.0  # type: ignore[attr-defined]
    documentation = sys.modules[solver_class(name).__module__].__doc__ or ""
    assert all(word in documentation for word in ("Solves:", "Cost:", "Shortcomings:"))


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
    text = f"solver '{name}' keeps the given order .* for order free use solver auto"
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
    ],
)
def test_bad_option_values_say_what_to_do(
    solver: str, options: dict[str, object], text: str
) -> None:
    with pytest.raises(SolverError, match=text):
        make_solver(solver, **options)


def test_solving_imports_neither_torch_nor_highspy() -> None:
    code = (
        "import sys, remat.solver\n"
        "assert 'torch' not in sys.modules\n"
        "for name in remat.solver.TABLE: remat.solver.solver_class(name)\n"
        "import remat.solver.mip as mip\n"
        "program = mip.MixedProgram(); program.variable(1.0)\n"
        "mip.solve_program(program, mip.Limits())\n"
        "assert not {'torch', 'highspy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_progress_tells_bound_and_best() -> None:
    heard = []
    graph = chain(12)
    peak_bytes = solve(graph, 1 << 60, "store_all").peak_bytes
    result = solve(graph, peak_bytes // 2, "cut", progress=heard.append)
    assert heard
    assert heard[-1].bound_overhead <= result.overhead + 1e-9
    assert all(a.seconds <= b.seconds for a, b in pairwise(heard))
