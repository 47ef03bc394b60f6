"""Budgets below the floor: what is said, what is proved, and what is still found."""

from __future__ import annotations

import random

import msgspec
import pytest

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import simulate
from remat.solver import Result, solve_within
from remat.solver.bounds.least_peak import (
    LEAST_BOUND,
    effort_for,
    floor_above,
    floor_of,
    floor_text,
)
from remat.solver.cuts import initial_solutions
from remat.solver.cuts.initial_solutions import offer_least_peak
from remat.solver.problem import Problem
from remat.solver.search import Search
from remat.solver.state import store_all_state
from remat.solver.stopping import REGRESSION
from tests.limits import AMPLE_S
from tests.solver.exhaustive import least_time_us
from tests.solver.graphs.random_graphs import chain, random_graph, resnet_like

SOLVERS = ("auto", "cut")


def net() -> TrainingGraph:
    """A residual net, whose least peak is below its floor; modules named."""
    graph = resnet_like(4)
    ops = [msgspec.structs.replace(op, module=f"stage.{op.name}") for op in graph.ops]
    return msgspec.structs.replace(graph, ops=tuple(ops))


@pytest.mark.parametrize("solver", SOLVERS)
def test_below_the_floor_outputs_are_recomputed_and_the_result_says_so(solver: str) -> None:
    graph = net()
    floor = floor_of(Problem.of(graph))
    budget_bytes = floor.size_bytes - 1
    result = solve_within(graph, budget_bytes, solver, time_limit_s=AMPLE_S)
    assert result.schedule is not None
    assert simulate(graph, result.schedule).peak_bytes <= budget_bytes
    assert f"The budget is below the floor of {floor.size_bytes} bytes" in result.message
    assert f"set by op {floor.name} (stage.{floor.name})" in result.message
    assert "outputs of the step are recomputed, by " in result.message
    assert result.floor is not None
    assert (result.floor.name, result.floor.module) == (floor.name, f"stage.{floor.name}")
    runs = result.schedule.computations()
    assert any(runs[graph.value_by_name[name].producer] > 1 for name in graph.outputs)


@pytest.mark.parametrize("solver", SOLVERS)
def test_at_the_floor_nothing_is_said(solver: str) -> None:
    graph = net()
    budget_bytes = floor_of(Problem.of(graph)).size_bytes
    result = solve_within(graph, budget_bytes, solver, time_limit_s=AMPLE_S)
    assert result.schedule is not None
    assert result.floor is None
    assert "floor" not in result.message


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("percent", [40, 95])
def test_where_nothing_fits_the_floor_and_the_least_bound_are_named(
    solver: str, percent: int
) -> None:
    graph = net()
    least_bytes = solve_within(graph, 0, "cut").least_feasible_bytes
    result = solve_within(graph, least_bytes * percent // 100, solver, time_limit_s=AMPLE_S)
    floor = floor_of(Problem.of(graph))
    assert result.status == "infeasible"
    assert result.message.startswith("no schedule fits")
    assert f"below the floor of {floor.size_bytes} bytes, set by op {floor.name}" in result.message
    assert "unless it computes outputs of the step again" in result.message
    assert f"{LEAST_BOUND} {result.least_bound_bytes} bytes" in result.message
    assert result.budget_bytes < result.least_bound_bytes <= result.least_feasible_bytes


def test_a_bound_on_the_peak_ends_the_search_early() -> None:
    """Every op has room, and the end too: only the bound shows that nothing fits."""
    graph = chain(8)
    bound_bytes = solve_within(graph, 0, "cut").least_bound_bytes
    result = solve_within(graph, bound_bytes - 1, time_limit_s=AMPLE_S)
    assert result.message.startswith("no schedule fits")
    assert result.status == "infeasible", "not for want of time"


def tiny_graphs() -> list[tuple[TrainingGraph, int]]:
    """Tiny graphs with a budget below the floor at which a schedule exists."""
    source = random.Random(3)
    found: list[tuple[TrainingGraph, int]] = []
    while len(found) < 12:
        graph = random_graph(source, 7, source.randint(0, 7))
        budget_bytes = floor_of(Problem.of(graph)).size_bytes - 1
        if least_time_us(graph, budget_bytes) is not None:
            found.append((graph, budget_bytes))
    return found


@pytest.mark.parametrize(("graph", "budget_bytes"), tiny_graphs())
def test_auto_finds_the_optimum_below_the_floor(graph: TrainingGraph, budget_bytes: int) -> None:
    result = solve_within(graph, budget_bytes, time_limit_s=AMPLE_S)
    assert result.time_us == least_time_us(graph, budget_bytes)
    assert "The budget is below the floor" in result.message


@pytest.mark.parametrize("solver", ["cut", "retention"])
def test_infeasible_is_said_only_where_it_is_proved(solver: str) -> None:
    """The one schedule runs an op twice in a stage: beyond both solvers."""
    source = random.Random(5)
    graph = [random_graph(source, 7, source.randint(0, 7)) for _ in range(39)][-1]
    assert least_time_us(graph, 25) is not None
    result = solve_within(graph, 25, solver, time_limit_s=AMPLE_S)
    assert (result.status, result.schedule) == ("none found", None)


def test_no_least_budget_is_above_square_root_checkpointing() -> None:
    """From what keeps everything, repair came down to 21 bytes alone."""
    source = random.Random(11)
    graph = [random_graph(source, 8, source.randint(4, 10)) for _ in range(59)][-1]
    checkpointed = solve_within(graph, 1 << 60, "chen_sqrt").peak_bytes
    search = Search(graph, 0, "test", AMPLE_S)
    offer_least_peak(search, store_all_state(search.problem))
    assert search.lowest_bytes <= checkpointed == 19


@pytest.mark.parametrize(("count", "repaired_bytes", "least_bytes"), [(29, 33, 25), (62, 18, 16)])
def test_where_no_repair_lowers_the_peak_full_moments_are_solved(
    count: int, repaired_bytes: int, least_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(11)
    graph = [random_graph(source, 9, source.randint(0, 9)) for _ in range(count)][-1]

    def least_found() -> int:
        search = Search(graph, 0, "test", AMPLE_S)
        offer_least_peak(search, store_all_state(search.problem))
        return search.lowest_bytes

    assert least_found() == least_bytes
    assert least_time_us(graph, least_bytes - 1) is None
    monkeypatch.setattr(initial_solutions, "_MOST_CHOSEN", 0)
    assert least_found() == repaired_bytes


def test_another_order_may_avoid_it() -> None:
    graph = net()
    floor = floor_above(Problem.of(graph), 0)
    assert floor is not None
    kept = solve_within(graph, 1 << 60, "store_all").schedule
    assert floor_text(graph, floor, kept).endswith("another order of first computations avoids it")


def test_effort_shrinks_with_size() -> None:
    assert effort_for(Problem.of(chain(4))) == REGRESSION.most


def test_results_with_a_floor_survive_json() -> None:
    graph = net()
    result = solve_within(graph, floor_of(Problem.of(graph)).size_bytes - 1, "cut")
    assert result.floor is not None
    assert msgspec.json.decode(msgspec.json.encode(result), type=Result) == result
