"""Ctrl-C over many solves of one job: none is begun after it, and what was found stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import remat
from remat.analysis import compare
from remat.graph_capture.graph import TrainingGraph
from remat.solver import solve_within
from remat.solver.budgets import sweep
from remat.solver.budgets.sweep import least_peak, sweep_budgets
from remat.solver.result import INTERRUPTED
from remat.solver.search import Clock, Progress, is_interrupted, note_interrupt, one_job
from remat.solver.stopping import DEFAULT_GAP
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.solver.graphs.random_graphs import gpt_like

Listener = Callable[[Progress], None]


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    return gpt_like(3)


def ctrl_c_once() -> tuple[Listener, list[str]]:
    """A listener during which Ctrl-C comes, the first time that it hears; and what it heard."""
    heard: list[str] = []

    def listen(state: Progress) -> None:
        heard.append(state.doing)
        if len(heard) == 1:
            raise KeyboardInterrupt

    return listen, heard


def test_in_a_job_no_clock_has_time_after_ctrl_c() -> None:
    clock = Clock(AMPLE_S)
    with one_job():
        assert clock.left_s > 0
        with one_job():
            note_interrupt()
        assert is_interrupted()
        assert clock.left_s == 0
    assert not is_interrupted()
    assert clock.left_s > 0


def test_outside_of_a_job_nothing_is_noted() -> None:
    note_interrupt()
    assert not is_interrupted()


def test_a_solve_after_one_that_ctrl_c_ended_has_its_time(graph: TrainingGraph) -> None:
    listen, _ = ctrl_c_once()
    budget_bytes = int(0.7 * peak_bytes_of(graph))
    ended = solve_within(graph, budget_bytes, progress=listen, time_limit_s=AMPLE_S)
    assert INTERRUPTED in ended.message
    again = solve_within(graph, budget_bytes, time_limit_s=AMPLE_S)
    assert again.gap <= DEFAULT_GAP


def test_a_sweep_in_a_job_that_ctrl_c_ended_tries_no_budget(graph: TrainingGraph) -> None:
    listen, heard = ctrl_c_once()
    most = peak_bytes_of(graph)
    budgets = [most * part // 10 for part in (1, 7, 8, 10)]
    with one_job():
        # Too little: the message of such a result does not begin with what ended the search.
        first = solve_within(graph, budgets[0], progress=listen, time_limit_s=AMPLE_S)
        front = sweep_budgets(graph, budgets, time_limit_s=AMPLE_S)
    assert heard
    assert INTERRUPTED in first.message
    assert all(INTERRUPTED in point.result.message for point in front.points)


def test_a_sweep_keeps_what_it_had(graph: TrainingGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def second_is_ended(one: TrainingGraph, budget_bytes: int, *args: Any, **options: Any) -> Any:
        calls.append(budget_bytes)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return solve_within(one, budget_bytes, *args, **options)

    monkeypatch.setattr(sweep, "solve_within", second_is_ended)
    most = peak_bytes_of(graph)
    front = sweep_budgets(
        graph, [7 * most // 10, 8 * most // 10, 9 * most // 10], time_limit_s=AMPLE_S
    )
    assert len(calls) == 2
    found, *rest = (point.result for point in front.points)
    assert found.gap <= DEFAULT_GAP
    assert all(result.schedule is not None for result in rest), "the first one's fits there too"


def test_compare_begins_no_solver_after_ctrl_c(
    graph: TrainingGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    swept = compare.sweep_budgets

    def ended(one: TrainingGraph, budgets: Any, name: str, *args: Any, **options: Any) -> Any:
        asked.append(name)
        found = swept(one, budgets, name, *args, **options)
        if name == "cut":
            note_interrupt()
        return found

    monkeypatch.setattr(compare, "sweep_budgets", ended)
    found = remat.sweep(graph, ["70%"], ["chen_sqrt", "cut", "msps"], time_limit_s=AMPLE_S)
    assert asked == ["chen_sqrt", "cut"]
    rows = {row.solver: row for row in found.rows}
    assert rows["cut"].cells[0].fits
    assert rows["msps"].refused == "interrupted before msps was tried"


def test_the_least_peak_is_named_by_what_was_found(graph: TrainingGraph) -> None:
    at_the_second: list[str] = []

    def listen(state: Progress) -> None:
        at_the_second.append(state.doing)
        if len(at_the_second) == 3:
            raise KeyboardInterrupt

    found = least_peak(graph, AMPLE_S, progress=listen)
    assert INTERRUPTED in found.message
    assert found.schedule is None or found.peak_bytes <= found.budget_bytes


@pytest.mark.parametrize("limit_s", [0.0])
def test_a_limit_that_is_too_short_is_named_and_simple_rules_are_tried(
    graph: TrainingGraph, limit_s: float
) -> None:
    found = solve_within(graph, int(0.8 * peak_bytes_of(graph)), time_limit_s=limit_s)
    assert found.status == "time limit"
    assert found.schedule is not None
    assert "the time limit of 0 s ended the search" in found.message
    assert "a simple rule" in found.message
    assert found.lower_bound_us <= found.time_us
