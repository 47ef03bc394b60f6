"""Free orders: the live curve, orders, the bound for every order, and exhaustive search."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import simulate
from remat.solver import Result
from remat.solver.backends.mip import Limits
from remat.solver.bounds.any_order_cut import (
    Ancestry,
    FreeCut,
    crossing_bytes,
    free_bound_us,
    free_least_peak_bound_bytes,
)
from remat.solver.bounds.cut_program import CutProgram
from remat.solver.cuts.cut import Cut, best_cut
from remat.solver.exact.exhaustive import Exhaustive
from remat.solver.orders.live_curve import LiveCurve, OpFacts
from remat.solver.orders.reorder import better_order, list_orders, lowest_order
from remat.solver.problem import Problem, is_allowed, reordered
from remat.solver.search import Search
from remat.solver.state import store_all_state
from tests.graphs import graph_from_nodes, peak_bytes_of, tiny_cases
from tests.solver.exhaustive import least_time_us
from tests.solver.graphs.random_graphs import gpt_like, random_graph, training_graphs, unet_like


def cheap(graph: TrainingGraph, budget_bytes: int) -> Result:
    return Cut(gap=0.01, cuts=1).solve(graph, budget_bytes)


def time_us_of(result: Result) -> float | None:
    return None if result.schedule is None else result.time_us


def tight_budgets(graph: TrainingGraph) -> range:
    peak_bytes = peak_bytes_of(graph)
    return range(peak_bytes - 1, max(peak_bytes - 12, 0), -4)


@settings(max_examples=60, deadline=None)
@given(training_graphs(max_ops=12), st.integers(0, 1 << 30))
def test_moving_ops_keeps_the_live_curve_true(graph: TrainingGraph, seed: int) -> None:
    source = random.Random(seed)
    facts = OpFacts.of(Problem.of(graph))
    curve = LiveCurve(facts, range(len(graph.ops)), limit_bytes=12)
    for _ in range(12):
        op = source.randrange(len(graph.ops))
        first, last = curve.span(op)
        place = source.randint(first, last)
        if place == curve.place[op]:
            continue
        curve.apply(curve.moved(op, place))
        fresh = LiveCurve(facts, curve.ops(), limit_bytes=12)
        assert is_allowed(graph, curve.ops())
        assert curve.place == fresh.place
        assert curve.entry_bytes.tolist() == fresh.entry_bytes.tolist()
        assert curve.over_bytes.tolist() == fresh.over_bytes.tolist()
        assert (curve.overload_bytes, curve.worst_bytes) == (
            fresh.overload_bytes, fresh.worst_bytes,
        )  # fmt: skip
        assert curve.peak_bytes == peak_bytes_of(reordered(graph, curve.ops()))


@settings(max_examples=40, deadline=None)
@given(training_graphs(max_ops=12))
def test_orders_are_allowed_and_better(graph: TrainingGraph) -> None:
    assert all(is_allowed(graph, order) for order in list_orders(OpFacts.of(Problem.of(graph))))
    lowest = lowest_order(graph, moves=300)
    if lowest is not None:
        assert peak_bytes_of(reordered(graph, lowest)) < peak_bytes_of(graph)
    budget_bytes = peak_bytes_of(graph) * 8 // 10
    order = better_order(graph, budget_bytes, moves=300)
    assert order == better_order(graph, budget_bytes, moves=300)
    assert order is None or is_allowed(graph, order)


def test_bad_options_are_named() -> None:
    with pytest.raises(SolverError, match="moves must be 0 or more, not -1"):
        better_order(gpt_like(1), 1, moves=-1)
    with pytest.raises(SolverError, match="order must be fixed or free, not 'any'"):
        Exhaustive(order="any")  # type: ignore[arg-type]
    with pytest.raises(SolverError, match="most_ops must be 1 or more, not 0"):
        Exhaustive(most_ops=0)
    with pytest.raises(SolverError, match=r"at most 14 ops \(most_ops\), and this graph has 54"):
        Exhaustive().solve(gpt_like(1), peak_bytes_of(gpt_like(1)) // 2)


@pytest.mark.parametrize("order", ["fixed", "free"])
@pytest.mark.parametrize("data", tiny_cases())
def test_exhaustive_equals_the_published_optimum(data: dict[str, Any], order: Any) -> None:
    graph = graph_from_nodes(data)
    for row in data["reference"]["rows"]:
        result = Exhaustive(order=order).solve(graph, row["budget"])
        optimum = row[f"optimal_cost_{order}_order"]
        assert time_us_of(result) == optimum
        assert result.status == ("infeasible" if optimum is None else "optimal")
        if optimum is None:
            least_bytes = data["reference"][f"min_peak_{order}_order"]
            assert result.least_feasible_bytes == least_bytes


@settings(max_examples=80, deadline=None)
@given(training_graphs(max_ops=7))
def test_exhaustive_equals_another_exhaustive_search(graph: TrainingGraph) -> None:
    for budget_bytes in tight_budgets(graph):
        result = Exhaustive().solve(graph, budget_bytes)
        assert time_us_of(result) == least_time_us(graph, budget_bytes)
        if result.schedule is None:
            assert "no schedule fits" in result.message
            assert least_time_us(graph, result.least_feasible_bytes) is not None
            assert least_time_us(graph, result.least_feasible_bytes - 1) is None
            break


@settings(max_examples=30, deadline=None)
@given(training_graphs(max_ops=5))
def test_a_free_order_is_the_best_of_all_fixed_ones(graph: TrainingGraph) -> None:
    orders = [o for o in itertools.permutations(range(len(graph.ops))) if is_allowed(graph, o)]
    for budget_bytes in tight_budgets(graph):
        times = [least_time_us(reordered(graph, order), budget_bytes) for order in orders]
        best_us = min((time for time in times if time is not None), default=None)
        result = Exhaustive(order="free").solve(graph, budget_bytes)
        assert time_us_of(result) == best_us
        if result.schedule is not None:
            assert simulate(graph, result.schedule).peak_bytes <= budget_bytes


def test_exhaustive_cut_short_still_bounds() -> None:
    graph = random_graph(random.Random(0), 14, 7)
    budget_bytes = peak_bytes_of(graph) * 3 // 4
    short = Exhaustive(order="free", time_limit_s=0.0).solve(graph, budget_bytes)
    best = Exhaustive(order="free").solve(graph, budget_bytes)
    assert short.status == "time limit"
    assert best.status == "optimal"
    assert graph.time_us < short.lower_bound_us < best.time_us


@settings(max_examples=40, deadline=None)
@given(training_graphs(max_ops=7))
def test_no_order_has_a_peak_below_its_bound(graph: TrainingGraph) -> None:
    lost = Exhaustive(order="free").solve(graph, 0)
    least_bytes = lost.least_feasible_bytes or lost.peak_bytes
    bound_bytes = free_least_peak_bound_bytes(graph)
    assert graph.resident.total_bytes <= bound_bytes <= least_bytes


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(training_graphs(max_ops=7))
def test_no_cut_exceeds_the_optimum_of_a_free_order(graph: TrainingGraph) -> None:
    ancestry = Ancestry.of(graph)
    for budget_bytes in tight_budgets(graph):
        optimum_us = time_us_of(Exhaustive(order="free").solve(graph, budget_bytes))
        limit_us = float("inf") if optimum_us is None else optimum_us * (1 + 1e-9)
        assert free_bound_us(graph, budget_bytes) <= limit_us
        for t in range(len(graph.ops)):
            cut = FreeCut.at(graph, t, budget_bytes, ancestry)
            assert cut.bound_us(Limits()) <= limit_us
            assert cut.relaxed_us(9.0) <= limit_us


@settings(max_examples=30, deadline=None)
@given(training_graphs(max_ops=12))
def test_what_crosses_an_op_is_live_in_every_order(graph: TrainingGraph) -> None:
    floor_bytes = int(crossing_bytes(graph, Ancestry.of(graph)).max())
    assert floor_bytes + graph.resident.total_bytes <= peak_bytes_of(graph)
    order = lowest_order(graph, moves=200)
    if order is not None:
        peak_bytes = peak_bytes_of(reordered(graph, order))
        assert floor_bytes + graph.resident.total_bytes <= peak_bytes


@pytest.mark.parametrize("graph", [gpt_like(2), unet_like(2)], ids=lambda g: g.name)
@pytest.mark.parametrize("percent", [80, 60])
def test_on_a_training_step_the_free_cut_equals_the_cut(graph: TrainingGraph, percent: int) -> None:
    budget_bytes = peak_bytes_of(graph) * percent // 100
    search = Search(graph, budget_bytes, "cut")
    place = best_cut(
        search, store_all_state(search.problem),
        lambda t: CutProgram(search.problem, (t,), search.budget_bytes),
    )  # fmt: skip
    assert place is not None
    fixed_us = CutProgram(search.problem, (place,), budget_bytes).solve(Limits()).bound_us
    free_us = FreeCut.at(graph, place, budget_bytes).bound_us(Limits())
    assert free_us == pytest.approx(fixed_us)
    assert fixed_us > graph.time_us
    found = cheap(graph, budget_bytes)
    assert free_us * (1 - 1e-9) <= free_bound_us(graph, budget_bytes) <= found.time_us * (1 + 1e-9)


def test_nothing_fits_in_any_order() -> None:
    assert free_bound_us(gpt_like(1), 1) == float("inf")


def test_the_bound_ends_where_enough_is_proved_or_time_is_over() -> None:
    graph = gpt_like(2)
    budget_bytes = peak_bytes_of(graph) * 6 // 10
    best_us = free_bound_us(graph, budget_bytes)
    early_us = free_bound_us(graph, budget_bytes, enough_us=graph.time_us)
    late_us = free_bound_us(graph, budget_bytes, time_limit_s=0.0)
    assert graph.time_us < min(early_us, late_us) <= max(early_us, late_us) <= best_us
