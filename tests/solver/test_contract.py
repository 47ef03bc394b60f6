"""What every solver promises, on every graph and budget of one grid."""

from __future__ import annotations

import functools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.solver import Result, make_solver, option_names, solve_within
from remat.solver.policies.template import StoreAll
from remat.solver.segments.chen_sqrt import ChenSqrt
from tests.limits import AMPLE_S
from tests.rows import rows
from tests.solver.checks import IGNORES_BUDGET, ON_THE_DEVICE, check
from tests.solver.graphs.random_graphs import (
    chain,
    gpt_like,
    resnet_like,
    training_graphs,
    unet_like,
)

GRAPHS = {
    "gpt1": functools.partial(gpt_like, 1),
    "chain8": functools.partial(chain, 8),
    "unet2": functools.partial(unet_like, 2),
    "resnet4": functools.partial(resnet_like, 4),
}
TINY_ONLY = ("exhaustive",)
"""Solvers that refuse graphs as large as those of the grid."""
SHORT_S = 4.0
"""Of solvers of large programs: what is promised holds too where they end before they are done."""
GAP = 0.02
"""At which searches end by themselves, and soon."""
SLOW = ("lp_rounding", "checkmate")
"""Solvers of large programs, which take seconds on all of the grid but the chain."""
OFTEN = ("auto", "cut", "chen_sqrt", "dtr")
"""Solvers whose results on the larger graphs of the grid are looked at in a quick run too."""
GRID = [name for name in ON_THE_DEVICE if name not in TINY_ONLY]
QUICK = [name for name in GRID if name not in SLOW]
CELLS = rows(
    ((solver, name) for solver in GRID for name in GRAPHS),
    lambda cell: cell[1] == "chain8" or cell[0] in (OFTEN if cell[1] != "resnet4" else QUICK),
)
UNLIMITED_BYTES = 1 << 60


@functools.cache
def graph_of(name: str) -> TrainingGraph:
    return GRAPHS[name]()


@functools.cache
def peak_bytes_of(name: str) -> int:
    return solve_within(graph_of(name), UNLIMITED_BYTES, "store_all").peak_bytes


@functools.cache
def result_of(solver: str, name: str, percent: int) -> Result:
    budget_bytes = peak_bytes_of(name) * percent // 100
    options = {"gap": GAP} if "gap" in option_names(solver) else {}
    limit_s = SHORT_S if solver in SLOW else AMPLE_S
    return solve_within(graph_of(name), budget_bytes, solver, time_limit_s=limit_s, **options)


@pytest.mark.parametrize("percent", [100, 80, 60, pytest.param(45, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("solver", "name"), CELLS)
def test_result_is_consistent(solver: str, name: str, percent: int) -> None:
    result = result_of(solver, name, percent)
    check(graph_of(name), result, peak_bytes_of(name) * percent // 100)
    if percent == 100 and solver not in IGNORES_BUDGET:
        assert result.status == "optimal"
        assert result.overhead == 0


@pytest.mark.parametrize("percent", [80, 60, pytest.param(45, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "solvers",
    [pytest.param(GRID, marks=pytest.mark.slow, id="all"), pytest.param(QUICK, id="quick")],
)
@pytest.mark.parametrize("name", GRAPHS)
def test_no_solver_beats_a_proven_bound(name: str, solvers: list[str], percent: int) -> None:
    results = [result_of(solver, name, percent) for solver in solvers]
    bound_us = max(r.lower_bound_us for r in results if r.solver != "checkmate")
    times_us = [result.time_us for result in results if result.schedule is not None]
    assert all(time_us >= bound_us * (1 - 1e-9) for time_us in times_us)


@pytest.mark.parametrize("name", GRAPHS)
def test_results_and_schedules_survive_json(name: str) -> None:
    result = result_of("cut", name, 80)
    assert msgspec.json.decode(msgspec.json.encode(result), type=Result) == result
    assert result.schedule is not None
    assert Schedule.from_json(result.schedule.to_json()) == result.schedule


@pytest.mark.parametrize("name", GRAPHS)
def test_chen_sqrt_lowers_the_peak(name: str) -> None:
    graph = graph_of(name)
    kept = simulate(graph, StoreAll().schedule(graph))
    segmented = simulate(graph, ChenSqrt().schedule(graph))
    assert kept.overhead == 0
    assert segmented.peak_bytes <= kept.peak_bytes


@settings(max_examples=60, deadline=None)
@given(training_graphs(max_ops=14), st.integers(0, 100))
def test_solvers_are_valid_on_any_graph(graph: TrainingGraph, percent: int) -> None:
    peak_bytes = solve_within(graph, UNLIMITED_BYTES, "store_all").peak_bytes
    budget_bytes = peak_bytes * percent // 100
    simulate(graph, ChenSqrt().schedule(graph))
    simulate(graph, StoreAll().schedule(graph))
    for solver in ("cut", "chen_sqrt", "store_all"):
        check(graph, make_solver(solver).solve(graph, budget_bytes), budget_bytes)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(training_graphs(max_ops=14))
def test_the_budget_that_an_infeasible_result_names_is_feasible(graph: TrainingGraph) -> None:
    lost = solve_within(graph, 0, "cut")
    least_bytes = lost.least_feasible_bytes or lost.peak_bytes
    found = solve_within(graph, least_bytes, "cut")
    assert found.schedule is not None
    assert found.peak_bytes <= least_bytes
