"""Exactness against exhaustive search: ours on random graphs, published on tiny ones."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layered import layered_graph
from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.solver import solve_within
from remat.solver.backends.mip import Backend, Limits
from remat.solver.bounds.cut_program import CutProgram
from remat.solver.exact.checkmate import Checkmate
from remat.solver.problem import Problem
from tests.graphs import graph_from_nodes, tiny_cases
from tests.paths import BENCH
from tests.solver.exhaustive import least_time_us
from tests.solver.graphs.random_graphs import random_graph, training_graphs


@pytest.mark.parametrize("backend", ["mathopt", "pulp"])
@pytest.mark.parametrize("data", tiny_cases())
def test_checkmate_equals_published_optimum(data: dict[str, Any], backend: Backend) -> None:
    graph = graph_from_nodes(data)
    for row in data["reference"]["rows"]:
        result = Checkmate(backend=backend).solve(graph, row["budget"])
        optimum = row["optimal_cost_fixed_order"]
        if optimum is None:
            assert result.status == "infeasible"
        else:
            assert result.time_us == optimum
            assert result.status == "optimal"


@pytest.mark.parametrize("data", tiny_cases())
def test_auto_equals_published_optimum(data: dict[str, Any]) -> None:
    graph = graph_from_nodes(data)
    for row in data["reference"]["rows"]:
        result = solve_within(graph, row["budget"])
        optimum = row["optimal_cost_fixed_order"]
        assert (None if result.schedule is None else result.time_us) == optimum


@pytest.mark.parametrize("data", tiny_cases())
def test_our_exhaustive_search_equals_the_published_one(data: dict[str, Any]) -> None:
    graph = graph_from_nodes(data)
    if len(graph.ops) > 8:
        pytest.skip("too large for this oracle")
    for row in data["reference"]["rows"]:
        assert least_time_us(graph, row["budget"]) == row["optimal_cost_fixed_order"]


def test_a_node_may_need_three_computations() -> None:
    path = BENCH / "checkmate_linear4.json"
    if not path.exists():
        pytest.skip(f"the reference instances are not at {BENCH}")
    data = json.loads(path.read_text())
    graph = graph_from_nodes(data)
    budget_bytes = data["reference"]["no_remat_peak"] * 75 // 100
    result = solve_within(graph, budget_bytes, "checkmate", passes=1)
    assert result.schedule is not None
    assert max(result.schedule.computations().values()) >= 3


def tight_budgets(graph: TrainingGraph) -> range:
    peak_bytes = solve_within(graph, 1 << 60, "store_all").peak_bytes
    return range(peak_bytes - 1, max(peak_bytes - 9, 0), -3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(training_graphs(max_ops=8))
def test_exact_equals_exhaustive_search(graph: TrainingGraph) -> None:
    for budget_bytes in tight_budgets(graph):
        optimum = least_time_us(graph, budget_bytes)
        result = solve_within(graph, budget_bytes, "checkmate")
        if optimum is None:
            assert result.status == "infeasible"
            break
        assert result.time_us == optimum
        assert result.status == "optimal"


@settings(max_examples=40, deadline=None)
@given(training_graphs(max_ops=8))
def test_bounds_never_exceed_the_optimum(graph: TrainingGraph) -> None:
    for budget_bytes in tight_budgets(graph):
        optimum = least_time_us(graph, budget_bytes)
        result = solve_within(graph, budget_bytes, "cut")
        if optimum is None:
            assert result.schedule is None
            break
        assert result.lower_bound_us <= optimum * (1 + 1e-9)
        assert "no schedule fits" not in result.message


@settings(max_examples=40, deadline=None)
@given(training_graphs(max_ops=8), st.data())
def test_any_cuts_bound_the_optimum(graph: TrainingGraph, data: st.DataObject) -> None:
    n_ops = len(graph.ops)
    cuts = data.draw(st.sets(st.integers(0, n_ops - 1), min_size=1, max_size=3))
    budget_bytes = tight_budgets(graph).start
    optimum = least_time_us(graph, budget_bytes)
    program = CutProgram(Problem.of(graph), tuple(sorted(cuts)), budget_bytes)
    for relaxed in (True, False):
        bound_us = program.relaxed(9.0).bound_us if relaxed else program.solve(Limits()).bound_us
        assert optimum is None or bound_us <= optimum * (1 + 1e-9)


@pytest.mark.slow
def test_one_sweep_a_stage_is_not_always_enough() -> None:
    source = random.Random(1)
    missed = 0
    for _ in range(40):
        graph = random_graph(source, 8, 4)
        for budget_bytes in tight_budgets(graph):
            optimum = least_time_us(graph, budget_bytes)
            one = solve_within(graph, budget_bytes, "checkmate", passes=1)
            assert optimum is None or one.schedule is None or one.time_us >= optimum
            missed += optimum is not None and (one.schedule is None or one.time_us > optimum)
    assert missed <= 6


def test_checkmate_refuses_more_ops_than_it_can_hold() -> None:
    graph = layered_graph(60, 0, by_layers=True)
    budget_bytes = solve_within(graph, 1 << 60, "store_all").peak_bytes * 7 // 10
    result = solve_within(graph, budget_bytes, "checkmate", most_ops=59, start=False)
    assert result.schedule is None
    assert "59 ops" in result.message
    with pytest.raises(SolverError, match="most_ops"):
        solve_within(graph, budget_bytes, "checkmate", most_ops=0)
