"""Graphs of thousands of ops: work in proportion to them, and an answer however short the time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import remat
from remat.budgets import unmodified
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.backends import mip
from remat.solver.backends.processes import OverdueError
from remat.solver.search import MANY_OPS, Search
from remat.solver.state import store_all_state
from tests.graphs import peak_bytes_of
from tests.solver.graphs.random_graphs import chain, gpt_like

NEAR_LINEAR = 2.3
"""Most times the work for twice the ops."""


def calls_of(run: Callable[[], Any]) -> int:
    """How many functions of Python and of C are called."""
    count = 0

    def counted(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["60%", "min"])
def test_what_is_done_without_time_grows_as_the_ops_do(budget: str) -> None:
    def work(length: int) -> int:
        graph = chain(length)
        return calls_of(lambda: remat.solve(graph, budget, time_limit_s=0))

    work(100)  # imports
    assert 0 < work(3000) < NEAR_LINEAR * work(1500)


@pytest.mark.parametrize("graph", [chain(1500), gpt_like(60)], ids=["chain", "gpt"])
def test_the_least_budget_is_named_without_any_time(graph: TrainingGraph) -> None:
    assert len(graph.ops) > MANY_OPS
    named = solve_within(graph, 1, time_limit_s=0)
    assert 0 < named.least_feasible_bytes < peak_bytes_of(graph)
    least = remat.solve(graph, "min", time_limit_s=0)
    assert least.schedule is not None
    assert least.budget_bytes == named.least_feasible_bytes
    assert simulate(graph, least.schedule).peak_bytes == least.peak_bytes <= least.budget_bytes
    assert solve_within(graph, least.budget_bytes, time_limit_s=0).schedule is not None


def test_a_bound_that_was_proved_is_told_where_the_time_ends_without_a_schedule() -> None:
    graph = chain(20)
    search = Search(graph, 1, "auto", time_limit_s=0)
    search.offer_least(store_all_state(search.problem))
    search.raise_bound(2 * graph.time_us)
    assert search.out_of_time()
    found = search.result()
    assert (found.status, found.lower_bound_us) == ("time limit", 2 * graph.time_us)
    assert found.least_feasible_bytes == peak_bytes_of(graph)


@pytest.mark.slow
def test_a_program_that_is_ended_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def overdue(*_: object) -> None:
        raise OverdueError

    monkeypatch.setattr(mip, "run_in_process", overdue)
    program = mip.MixedProgram()
    program.row([(program.variable(1.0, integer=True), 1.0)], lower=1.0)
    answer = mip.solve_program(program, mip.Limits())
    assert (answer.values, answer.proved_infeasible, answer.finished) == (None, False, False)
    graph = gpt_like(3)
    found = solve_within(graph, int(0.6 * peak_bytes_of(graph)), time_limit_s=2)
    assert found.lower_bound_us >= graph.time_us
    if found.schedule is not None:
        assert simulate(graph, found.schedule).peak_bytes <= found.budget_bytes


def test_the_unmodified_step_is_worked_out_once() -> None:
    graph = chain(50)
    assert unmodified(graph) is unmodified(graph)
