"""Rounding of the relaxed program: against exhaustive search, reference data and the simulator."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings

from remat.baselines.lp_rounding import LpRounding, rounded_state
from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.schedules.simulate import simulate
from remat.solver import Progress, solve_within
from remat.solver.problem import Problem
from remat.solver.segments.chen_sqrt import chen_state
from tests.graphs import graph_from_nodes, peak_bytes_of, tiny_cases
from tests.limits import LateClock
from tests.solver.exhaustive import least_time_us
from tests.solver.graphs.random_graphs import chain, random_graph, training_graphs, unet_like


@pytest.mark.parametrize("data", tiny_cases())
def test_never_below_the_published_optimum(data: dict[str, Any]) -> None:
    graph = graph_from_nodes(data)
    for row in data["reference"]["rows"][::3]:
        optimum = row["optimal_cost_fixed_order"]
        result = LpRounding(passes=3).solve(graph, row["budget"])
        if optimum is None:
            assert result.schedule is None
            continue
        assert "no schedule fits" not in result.message
        assert result.lower_bound_us <= optimum
        if result.schedule is not None:
            assert simulate(graph, result.schedule).peak_bytes <= row["budget"]
            assert result.time_us >= optimum


@pytest.mark.slow
def test_most_tiny_graphs_round_to_something() -> None:
    source, found, wanted, above = random.Random(5), 0, 0, 0
    for _ in range(16):
        graph = random_graph(source, 8, 4)
        budget_bytes = peak_bytes_of(graph) - 2
        wanted += least_time_us(graph, budget_bytes) is not None
        result = LpRounding().solve(graph, budget_bytes)
        found += result.schedule is not None
        above += LpRounding(passes=3).solve(graph, budget_bytes).lower_bound_us > graph.time_us
    assert wanted >= found > wanted // 2
    assert above > 1


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(training_graphs(max_ops=8))
def test_bounds_never_exceed_the_optimum(graph: TrainingGraph) -> None:
    peak_bytes = peak_bytes_of(graph)
    for budget_bytes in (peak_bytes - 1, peak_bytes - 5):
        optimum = least_time_us(graph, max(budget_bytes, 0))
        result = LpRounding(passes=3).solve(graph, max(budget_bytes, 0))
        if optimum is None:
            assert result.schedule is None
            continue
        assert "no schedule fits" not in result.message
        assert result.lower_bound_us <= optimum * (1 + 1e-9)
        if result.schedule is not None:
            assert simulate(graph, result.schedule).peak_bytes <= budget_bytes
            assert result.time_us >= optimum * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(training_graphs(max_ops=14))
def test_any_rounding_is_a_valid_schedule(graph: TrainingGraph) -> None:
    problem, source = Problem.of(graph), random.Random(0)
    point = [
        {v: source.random() for v, op in enumerate(problem.producer) if op < stage}
        for stage in range(problem.n_ops + 1)
    ]
    for threshold in (-1.0, 0.3, 0.7, 2.0):
        state = rounded_state(problem, point, lambda part, least=threshold: part > least)
        found = simulate(graph, state.schedule())
        assert found.time_us == pytest.approx(graph.time_us + state.cost_us)
        assert found.peak_bytes == max(int(state.peak_bytes.max()), problem.resident_bytes)
        if threshold < 0:
            assert state.cost_us == 0


def test_a_value_that_is_made_anyway_is_not_carried() -> None:
    ops = (
        Op("a", "t", "forward", (), ("a0",), 1.0),
        Op("b", "t", "forward", ("a0",), ("b0", "b1"), 1.0),
        Op("c", "t", "backward", (), ("c0",), 1.0),
    )
    made = {"a0": "a", "b0": "b", "b1": "b", "c0": "c"}
    values = tuple(Value(name, 1, op) for name, op in made.items())
    graph = TrainingGraph("siblings", ops, values, outputs=("b0", "b1"))
    carried = ([], ["a0"], ["a0"], ["b1"])
    names = list(made)
    point = [{names.index(name): 1.0 for name in stage} for stage in carried]
    state = rounded_state(Problem.of(graph), point, lambda part: part > 0.5)
    assert simulate(graph, state.schedule()).time_us == graph.time_us + state.cost_us == 5.0
    assert not state.kept[3, names.index("b1")]


def test_whole_numbers_round_to_themselves() -> None:
    problem = Problem.of(unet_like(2))
    plan = chen_state(problem)
    point = [
        {v: float(plan.kept[t, v]) for v, op in enumerate(problem.producer) if op < t}
        for t in range(problem.n_ops + 1)
    ]
    state = rounded_state(problem, point, lambda part: part > 0.5)
    assert state.cost_us == plan.cost_us
    assert (state.kept == plan.kept).all()


def test_the_same_seed_gives_the_same_plan() -> None:
    graph = chain(8)
    budget_bytes = peak_bytes_of(graph) * 6 // 10
    one, two, other = (LpRounding(seed=seed).solve(graph, budget_bytes) for seed in (1, 1, 2))
    assert one.schedule is not None
    assert one.schedule == two.schedule
    assert other.schedule is not None
    assert other.schedule.options["seed"] == 2


def test_repair_never_costs_time() -> None:
    graph = chain(8)
    budget_bytes = peak_bytes_of(graph) * 7 // 10
    bare = LpRounding(rounds=3).solve(graph, budget_bytes)
    repaired = LpRounding(rounds=3, repair=True).solve(graph, budget_bytes)
    assert bare.schedule is not None
    assert repaired.schedule is not None
    assert repaired.time_us <= bare.time_us
    assert "rounded from the relaxed program at slack" in bare.message


def test_a_bound_is_claimed_from_three_sweeps_on() -> None:
    graph = chain(6)
    budget_bytes = peak_bytes_of(graph) * 8 // 10
    optimum = solve_within(graph, budget_bytes, "checkmate")
    one = LpRounding().solve(graph, budget_bytes)
    three = LpRounding(passes=3).solve(graph, budget_bytes)
    assert one.lower_bound_us == graph.time_us < three.lower_bound_us <= optimum.time_us


def test_large_graphs_are_refused() -> None:
    graph = chain(8)
    result = LpRounding(most_ops=10).solve(graph, peak_bytes_of(graph) // 2)
    assert result.schedule is None
    assert result.status == "time limit"
    assert "the graph has 18 ops, more than most_ops = 10" in result.message


def test_an_lp_cut_short_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, late = unet_like(2), LateClock(monkeypatch, "solving the relaxed program")
    result = LpRounding(progress=late).solve(graph, peak_bytes_of(graph) // 2)
    assert result.status == "time limit"
    assert "did not finish within the time limit" in result.message


def test_an_interrupt_keeps_the_best() -> None:
    def listener(progress: Progress) -> None:
        raise KeyboardInterrupt

    graph = chain(8)
    result = LpRounding(progress=listener).solve(graph, peak_bytes_of(graph) // 2)
    assert result.status == "time limit"
    assert "interrupted" in result.message


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slack": 1.0}, "slack must be at least 0 and below 1, not 1.0"),
        ({"slack": -0.1}, "slack must be at least 0 and below 1, not -0.1"),
        ({"rounds": -1}, "rounds must be 0 or more, not -1"),
        ({"passes": 0}, "passes must be 1 or more, not 0"),
        ({"most_ops": 0}, "most_ops must be 1 or more, not 0"),
        ({"backend": "gurobi"}, "unknown LP backend 'gurobi'; there are mathopt, pulp"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SolverError, match=text):
        LpRounding(**options)
