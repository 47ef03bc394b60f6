"""Solves in a free order, by `auto` and by any solver of fixed orders."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from benchmarks.layered import layered_graph
from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Schedule
from remat.schedules.simulate import simulate
from remat.solver import Progress, Result, solve_within
from remat.solver.auto import Auto
from remat.solver.cuts.cut import Cut
from remat.solver.exact.exhaustive import Exhaustive
from remat.solver.orders.free_order import FreeOrder, Share
from remat.solver.search import Clock
from tests.graphs import graph_from_nodes, peak_bytes_of, tiny_cases
from tests.limits import AMPLE_S, LateClock
from tests.paths import BENCH
from tests.solver.graphs.random_graphs import (
    LARGE_BYTES,
    branches,
    gpt_like,
    training_graphs,
    unet_like,
)


def cheap(graph: TrainingGraph, budget_bytes: int, share: Share | None = None) -> Result:
    limit_s = share.time_limit_s if share else 60.0
    return Cut(gap=0.01, cuts=1, time_limit_s=limit_s).solve(graph, budget_bytes)


def reference(name: str) -> dict[str, Any]:
    path: Path = BENCH / name
    if not path.exists():
        pytest.skip(f"the reference instances are not at {BENCH}")
    return json.loads(path.read_text())


def first_runs(schedule: Schedule | None) -> list[str]:
    assert schedule is not None
    return list(dict.fromkeys(s.op for s in schedule.steps if isinstance(s, Compute)))


def check(graph: TrainingGraph, result: Result, budget_bytes: int) -> None:
    """A Result in a free order is one of `auto` for the graph as given."""
    assert (result.solver, result.budget_bytes) == ("auto", budget_bytes)
    if result.schedule is not None:
        found = simulate(graph, result.schedule)
        assert found.peak_bytes == result.peak_bytes <= budget_bytes
        assert result.schedule.options["order"] == "free"
        assert result.schedule.solver == "auto"
        assert 0 < result.lower_bound_us <= result.time_us or graph.time_us == 0


def test_an_order_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SolverError, match="order must be fixed or free, not 'any'"):
        Auto(order="any")  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("data", tiny_cases())
def test_auto_equals_the_published_optimum_of_a_free_order(data: dict[str, Any]) -> None:
    graph = graph_from_nodes(data)
    for row in data["reference"]["rows"]:
        result = solve_within(graph, row["budget"], order="free")
        check(graph, result, row["budget"])
        optimum = row["optimal_cost_free_order"]
        assert (None if result.schedule is None else result.time_us) == optimum
        assert result.status == ("infeasible" if optimum is None else "optimal")
        if optimum is None:
            assert "every order" in result.message
            assert result.least_feasible_bytes == data["reference"]["min_peak_free_order"]


@pytest.mark.parametrize("count", [2, 16])
def test_another_order_is_found_where_the_given_one_is_infeasible(count: int) -> None:
    graph = branches(count, no_recompute="draws randomly")
    budget_bytes = LARGE_BYTES + count + 1
    fixed = solve_within(graph, budget_bytes, time_limit_s=AMPLE_S)
    free = solve_within(graph, budget_bytes, order="free", time_limit_s=AMPLE_S)
    check(graph, free, budget_bytes)
    assert fixed.status == "infeasible"
    assert (free.status, free.overhead) == ("optimal", 0.0)
    assert first_runs(free.schedule) != [op.name for op in graph.ops]


def test_another_order_saves_what_would_run_again() -> None:
    graph = branches(16)
    budget_bytes = LARGE_BYTES + 17
    fixed = solve_within(graph, budget_bytes, time_limit_s=AMPLE_S)
    free = solve_within(graph, budget_bytes, order="free", time_limit_s=AMPLE_S)
    check(graph, free, budget_bytes)
    assert fixed.overhead > 0.4
    assert free.overhead == 0.0
    assert "not in the captured order" in free.message


@pytest.mark.parametrize("build", [gpt_like, unet_like])
def test_on_a_training_step_the_given_order_is_proved_for_all(build: Any) -> None:
    graph = build(2)
    budget_bytes = peak_bytes_of(graph) * 8 // 10
    free = solve_within(graph, budget_bytes, order="free", gap=0.01, time_limit_s=AMPLE_S)
    check(graph, free, budget_bytes)
    assert free.gap <= 0.01
    assert free.status != "time limit"


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(training_graphs(max_ops=18))
def test_auto_in_a_free_order_is_valid_and_never_worse(graph: TrainingGraph) -> None:
    budget_bytes = peak_bytes_of(graph) * 8 // 10
    fixed = solve_within(graph, budget_bytes, time_limit_s=AMPLE_S)
    free = solve_within(graph, budget_bytes, order="free", time_limit_s=AMPLE_S)
    check(graph, free, budget_bytes)
    if fixed.schedule is not None:
        assert free.schedule is not None
        assert free.time_us <= fixed.time_us * (1 + 1e-9)


def test_that_nothing_fits_in_any_order_is_said_where_it_is_proved() -> None:
    graph = gpt_like(1)
    budget_bytes = peak_bytes_of(graph) // 20
    result = solve_within(graph, budget_bytes, order="free", time_limit_s=AMPLE_S)
    check(graph, result, budget_bytes)
    refusal = f"no schedule fits {budget_bytes} bytes in any order of first computations"
    assert result.status == "infeasible"
    assert result.message.startswith(refusal)
    assert f"{result.least_bound_bytes} bytes in any order. In the given order: " in result.message
    assert budget_bytes < result.least_bound_bytes <= result.least_feasible_bytes
    assert result.held_at_peak


def test_what_is_not_proved_is_not_said() -> None:
    graph = layered_graph(40, 0, by_layers=True)
    peak_bytes = peak_bytes_of(graph)
    budget_bytes = peak_bytes * 9 // 10

    def nothing(graph: TrainingGraph, budget_bytes: int, share: Share) -> Result:
        return Result(
            "infeasible", "auto", budget_bytes, least_feasible_bytes=peak_bytes, message="said"
        )

    result = FreeOrder(graph, budget_bytes, nothing, moves=200).solve()
    assert (result.status, result.solver) == ("none found", "auto")
    assert result.least_feasible_bytes == peak_bytes
    refusal, *_, given = result.message.split(". ")
    assert refusal.startswith(f"no schedule found that fits {budget_bytes} bytes in the given")
    assert "3 others were tried" in refusal
    assert given == "In the given order: said"


def test_the_budget_that_an_infeasible_result_names_is_feasible() -> None:
    graph = branches(16, no_recompute="draws randomly")
    lost = solve_within(graph, LARGE_BYTES, order="free", time_limit_s=AMPLE_S)
    assert lost.schedule is None
    found = solve_within(graph, lost.least_feasible_bytes, order="free", time_limit_s=AMPLE_S)
    assert found.schedule is not None


def test_when_time_is_up_the_best_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, late = layered_graph(120, 0, by_layers=True), LateClock(monkeypatch)
    budget_bytes = peak_bytes_of(graph) * 7 // 10
    result = solve_within(graph, budget_bytes, order="free", time_limit_s=AMPLE_S, progress=late)
    check(graph, result, budget_bytes)
    assert result.status == "time limit"
    assert result.schedule is not None


@pytest.mark.clock
def test_the_time_limit_is_kept_and_the_best_too() -> None:
    graph = layered_graph(120, 0, by_layers=True)
    budget_bytes = peak_bytes_of(graph) * 7 // 10
    began_s = time.monotonic()
    result = solve_within(graph, budget_bytes, order="free", time_limit_s=3.0)
    assert time.monotonic() - began_s < 5.0
    check(graph, result, budget_bytes)
    assert result.status == "time limit"
    assert result.schedule is not None


@pytest.mark.parametrize("after", ["the given order", "looking for", "an order for"])
def test_an_interrupt_keeps_the_best(after: str) -> None:
    graph = layered_graph(60, 0, by_layers=True)
    budget_bytes = peak_bytes_of(graph) * 7 // 10
    known: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        known.append(progress)
        if progress.doing.startswith(after) and progress.best_overhead is not None:
            raise KeyboardInterrupt

    result = solve_within(
        graph, budget_bytes, order="free", progress=interrupt, time_limit_s=AMPLE_S
    )
    check(graph, result, budget_bytes)
    assert (result.status, result.message.split(":")[0]) == ("time limit", "interrupted")
    assert result.schedule is not None
    assert known[-1].best_overhead is not None
    assert result.overhead <= known[-1].best_overhead + 1e-9


def test_progress_never_gets_worse_and_ends_at_the_result() -> None:
    graph = layered_graph(40, 1, by_layers=True)
    budget_bytes = peak_bytes_of(graph) * 8 // 10
    told: list[Progress] = []
    result = solve_within(
        graph, budget_bytes, order="free", progress=told.append, time_limit_s=AMPLE_S
    )
    found = [p.best_overhead for p in told if p.best_overhead is not None]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(result.overhead)
    bounds = [p.bound_overhead for p in told]
    assert bounds == sorted(bounds)
    assert bounds[-1] <= result.lower_bound_us / graph.time_us - 1 + 1e-9
    assert any(p.doing.startswith("the given order: ") for p in told)


@pytest.mark.parametrize(
    ("percent", "most"), [(90, 0.0), pytest.param(80, 0.003, marks=pytest.mark.slow)]
)
def test_a_published_layered_graph_in_free_order(percent: int, most: float) -> None:
    data = reference("moccasin_rl1.json")
    graph = graph_from_nodes(data)
    budget_bytes = data["reference"]["no_remat_peak"] * percent // 100
    result = FreeOrder(graph, budget_bytes, cheap).solve()
    assert cheap(graph, budget_bytes).overhead > result.overhead
    assert result.overhead <= most
    assert result.schedule is not None
    assert simulate(graph, result.schedule).peak_bytes == result.peak_bytes <= budget_bytes


@pytest.mark.slow
def test_a_random_layered_graph_in_free_order() -> None:
    graph = layered_graph(60, 3, by_layers=True)
    budget_bytes = peak_bytes_of(graph) * 8 // 10
    free, again = (FreeOrder(graph, budget_bytes, cheap, moves=6000).solve() for _ in range(2))
    assert free.overhead <= cheap(graph, budget_bytes).overhead * 2 / 3
    assert 0 < free.lower_bound_us <= free.time_us
    assert again.schedule == free.schedule


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(training_graphs(max_ops=9))
def test_a_free_order_is_never_worse(graph: TrainingGraph) -> None:
    peak_bytes = peak_bytes_of(graph)
    for budget_bytes in range(peak_bytes - 1, max(peak_bytes - 12, 0), -4):
        fixed = cheap(graph, budget_bytes)
        free = FreeOrder(graph, budget_bytes, cheap, moves=200).solve()
        best = Exhaustive(order="free").solve(graph, budget_bytes)
        if fixed.schedule is not None:
            assert free.schedule is not None
            assert free.time_us <= fixed.time_us
        if best.schedule is not None:
            assert free.lower_bound_us <= best.time_us * (1 + 1e-9)
            assert not free.message.startswith("no schedule fits")
        if free.schedule is not None:
            assert best.time_us <= free.time_us * (1 + 1e-9)
        else:
            assert free.least_bound_bytes <= free.least_feasible_bytes


def test_without_time_the_given_order_stands() -> None:
    graph = gpt_like(1)
    budget_bytes = peak_bytes_of(graph) * 8 // 10
    free = FreeOrder(graph, budget_bytes, lambda g, b, _: cheap(g, b), clock=Clock(0.0)).solve()
    assert free.schedule == cheap(graph, budget_bytes).schedule
    assert free.status == ("optimal" if free.gap <= 1e-9 else "time limit")


def test_an_interrupt_of_any_solver_keeps_the_given_order() -> None:
    graph = layered_graph(40, 0, by_layers=True)
    budget_bytes = peak_bytes_of(graph) * 8 // 10
    fixed = cheap(graph, budget_bytes)

    def interrupted(other: TrainingGraph, budget_bytes: int, share: Share) -> Result:
        if other.ops != graph.ops:
            raise KeyboardInterrupt
        return cheap(other, budget_bytes, share)

    found = FreeOrder(graph, budget_bytes, interrupted, moves=500).solve()
    assert found.time_us == fixed.time_us
    assert found.message.startswith("interrupted")
