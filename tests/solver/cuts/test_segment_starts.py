"""Segments between lower sets, as starts of a search."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import simulate
from remat.solver import solve_within, stopping
from remat.solver.cuts import cut
from remat.solver.cuts.initial_solutions import offer_segments
from remat.solver.search import Search
from remat.solver.state import store_all_state
from remat.solver.stopping import WorkLimit
from tests.limits import AMPLE_S
from tests.solver.graphs.random_graphs import chain, gpt_like, resnet_like

Build = Callable[[], TrainingGraph]


def budget_of(graph: TrainingGraph, percent: int) -> int:
    return solve_within(graph, 1 << 60, "store_all").peak_bytes * percent // 100


@pytest.mark.parametrize("build", [functools.partial(chain, 30), functools.partial(gpt_like, 2)])
def test_the_start_is_the_schedule_of_lower_set(build: Build) -> None:
    graph = build()
    search = Search(graph, budget_of(graph, 60), "cut")
    offer_segments(search)
    expected = solve_within(graph, search.budget_bytes, "lower_set")
    assert search.best is not None
    judged = simulate(graph, search.best)
    assert judged.peak_bytes <= search.budget_bytes
    assert judged.overhead == pytest.approx(expected.overhead)


def test_nothing_is_offered_where_no_time_is_left() -> None:
    graph = chain(30)
    search = Search(graph, budget_of(graph, 60), "cut", time_limit_s=0.0)
    offer_segments(search)
    assert search.best is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "percent", "is_tried"),
    [(functools.partial(gpt_like, 4), 70, False), (functools.partial(resnet_like, 12), 45, True)],
)
def test_they_are_tried_where_one_cut_leaves_a_wide_gap(
    build: Build, percent: int, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Search] = []
    monkeypatch.setattr(cut, "offer_segments", tried.append)
    graph = build()
    search = Search(graph, budget_of(graph, percent), "cut", time_limit_s=AMPLE_S)
    cut.begin(search, store_all_state(search.problem), 1e-3)
    assert bool(tried) is is_tried


@pytest.mark.parametrize("has_start", [False, True])
def test_they_are_tried_wherever_there_is_no_schedule_yet(
    has_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "FIRST_REPAIRS", WorkLimit(-1))
    monkeypatch.setattr(cut, "TARGETS", ())
    monkeypatch.setattr(cut, "offer_first", lambda *_, **__: None)
    graph = chain(30)
    search = Search(graph, budget_of(graph, 60), "cut", time_limit_s=AMPLE_S)
    cut.begin(search, store_all_state(search.problem), 1e-3, has_start=has_start)
    assert search.best is not None


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        ((), [False]),
        (("offer_segments",), [False]),
        (("offer_segments", "offer_first"), [False, True]),
    ],
)
def test_a_long_repair_waits_for_others_and_goes_on_where_they_find_nothing(
    left_out: tuple[str, ...], expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    repaired: list[bool] = []
    repair_from = cut.repair_from

    def noted(search: Search, *args: Any) -> bool:
        repaired.append(repair_from(search, *args))
        return repaired[-1]

    monkeypatch.setattr(cut, "repair_from", noted)
    monkeypatch.setattr(stopping, "FIRST_REPAIRS", WorkLimit(-1))
    monkeypatch.setattr(cut, "TARGETS", ())
    for name in left_out:
        monkeypatch.setattr(cut, name, lambda *_, **__: None)
    graph = chain(30)
    search = Search(graph, budget_of(graph, 60), "cut")
    cut.begin(search, store_all_state(search.problem), 1e-3)
    assert repaired == expected
    assert search.best is not None
    assert simulate(graph, search.best).peak_bytes <= search.budget_bytes
