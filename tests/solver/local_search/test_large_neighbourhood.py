"""Large neighbourhood search: the same plan twice, and what it ends at on small graphs."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.local_search.neighbourhoods import LargeNeighbourhoods, runs_by_stage
from remat.solver.search import Search
from tests.graphs import peak_bytes_of
from tests.solver.graphs.random_graphs import gpt_like
from tests.solver.graphs.tight_cases import tight_cases


def around(graph: TrainingGraph, budget_bytes: int, first: str, **options: Any) -> Any:
    """A search that knows the schedule of solver `first`, and neighbourhoods of it."""
    result = solve_within(graph, budget_bytes, first)
    assert result.schedule is not None
    search = Search(graph, budget_bytes, "test")
    assert search.offer_schedule(result.schedule)
    return LargeNeighbourhoods(search, lambda: False, **options), result.time_us


@functools.cache
def small_gpt() -> tuple[TrainingGraph, int]:
    graph = gpt_like(1)
    return graph, peak_bytes_of(graph) * 60 // 100


@functools.cache
def searched(seed: int, workers: int, attempt: int = 0) -> tuple[bytes, float, float]:
    """The schedule after a few rounds on the small GPT, its time, and that of the first."""
    graph, budget_bytes = small_gpt()
    near, first_us = around(graph, budget_bytes, "lru", seed=seed, workers=workers)
    near.run(0.3)
    assert near.search.best is not None
    found = simulate(graph, near.search.best)
    assert found.peak_bytes <= budget_bytes
    assert found.time_us == pytest.approx(graph.time_us + near.cost_us)
    return near.search.best.to_json(), found.time_us, first_us


@pytest.mark.parametrize("workers", [1, 2])
def test_a_seed_and_a_number_of_workers_give_the_same_schedule(workers: int) -> None:
    schedule, time_us, first_us = searched(1, workers)
    assert time_us < first_us
    assert searched(1, workers, attempt=1)[0] == schedule


def test_another_seed_goes_another_way() -> None:
    assert searched(0, 1)[0] != searched(1, 1)[0]


def test_where_the_gap_is_wide_the_first_set_is_a_whole_small_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, budget_bytes = small_gpt()
    near, _ = around(graph, budget_bytes, "lru")
    sizes: list[int] = []
    tried = near._try
    monkeypatch.setattr(
        near, "_try", lambda chosen, *rest: sizes.append(len(chosen)) or tried(chosen, *rest)
    )
    near.size = 8.0
    near.run(0.01)
    near.size = 8.0
    near.run(0.01)
    assert sizes[0] == len(graph.ops)
    assert sizes[1] < len(graph.ops)


def test_a_search_that_is_good_enough_does_nothing() -> None:
    graph, budget_bytes = small_gpt()
    near, first_us = around(graph, budget_bytes, "lru")
    near.stop = lambda: True
    best = near.search.best
    near.run(1.0)
    assert near.search.best is best
    assert simulate(graph, best).time_us <= first_us


@pytest.mark.slow
@pytest.mark.parametrize("first", ["lru", "cut"])
def test_a_small_graph_is_exhausted_and_as_a_rule_at_the_optimum(first: str) -> None:
    """All candidate stages are searched in the end; seldom is the optimum not among them."""
    tried = optimal = 0
    for graph, budget_bytes, optimum_us in tight_cases(18, 700):
        if optimum_us is None or solve_within(graph, budget_bytes, first).schedule is None:
            continue
        near, first_us = around(graph, budget_bytes, first)
        near.run(effort=3.0)
        assert near.is_exhausted
        best_us = simulate(graph, near.search.best).time_us
        assert optimum_us <= best_us <= first_us
        optimal += best_us == optimum_us
        tried += 1
    assert tried >= 15
    assert optimal >= 0.95 * tried


def test_a_cheaper_schedule_from_elsewhere_is_searched_around_after_a_restart() -> None:
    case = next(case for case in tight_cases(18, 700) if case.optimum_us is not None)
    near, _ = around(case.graph, case.budget_bytes, "cut")
    near.run(effort=3.0)
    near.restart()
    assert not near.is_exhausted
    assert near.runs == runs_by_stage(near.search.problem, near.search.best)
