"""What a search knows of itself, and what a listener hears while a solver works."""

from __future__ import annotations

from itertools import pairwise

import pytest

from remat.solver import Progress, solve_within
from remat.solver.search import Search
from remat.solver.state import store_all_state
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.rows import each_nth
from tests.solver.graphs.random_graphs import chain, resnet_like


def test_every_better_schedule_and_bound_is_heard_at_once() -> None:
    graph = chain(6)
    heard: list[Progress] = []
    search = Search(graph, 1 << 60, "test", progress=heard.append)
    plain = store_all_state(search.problem)
    search.raise_bound(graph.time_us)
    assert heard == []
    search.offer(plain)
    assert [p.best_overhead for p in heard] == [0.0]
    search.offer(plain)
    assert len(heard) == 1
    lower = Search(graph, 1, "test", progress=heard.append)
    lower.say("proving")
    lower.raise_bound(2 * graph.time_us)
    lower.raise_bound(1.5 * graph.time_us)
    assert [(p.bound_overhead, p.doing) for p in heard[1:]] == [(0.0, "proving"), (1.0, "proving")]


def test_schedules_and_sequences_are_heard_too() -> None:
    graph = chain(6)
    heard: list[Progress] = []
    search = Search(graph, 1 << 60, "test", progress=heard.append)
    twice = [0, *range(len(graph.ops))]
    search.offer_sequence([*twice[:2], 0, *twice[2:]])
    search.offer_sequence(twice[1:])
    assert heard[-1].best_overhead == 0.0


@pytest.mark.parametrize("solver", each_nth(2, ["auto", "cut"]))
def test_a_listener_hears_the_first_schedule_before_the_search_ends(solver: str) -> None:
    graph = resnet_like(5)
    budget_bytes = solve_within(graph, 1 << 60, "store_all").peak_bytes * 6 // 10
    heard: list[Progress] = []
    result = solve_within(graph, budget_bytes, solver, progress=heard.append, time_limit_s=AMPLE_S)
    first = next(p for p in heard if p.best_overhead is not None)
    assert first is not heard[-1]
    assert first.seconds < result.wall_s
    found = [p for p in heard if p.best_overhead is not None]
    assert all(a.best_overhead >= b.best_overhead for a, b in pairwise(found))  # type: ignore[operator]
    assert all(a.bound_overhead <= b.bound_overhead for a, b in pairwise(heard))
    assert found[-1].best_overhead == pytest.approx(result.overhead)
    assert heard[-1].bound_overhead == pytest.approx(result.lower_bound_us / graph.time_us - 1)


def test_the_gap_is_time_over_bound() -> None:
    assert Progress(1.0, 0.32, 0.2, "").gap == pytest.approx(0.1)
    assert Progress(1.0, None, 0.2, "").gap is None
    assert Progress(1.0, 0.2, 0.2 + 1e-12, "").gap == 0.0


def test_a_search_without_room_names_what_takes_more() -> None:
    graph = chain(3)
    search = Search(graph, 1, "test")
    assert not search.has_room()
    assert search.message.startswith("op ")
    assert "alone needs" in search.message
    assert Search(graph, 1 << 60, "test").has_room()


def test_a_search_is_open_until_the_gap_is_closed_or_nothing_fits_or_time_is_up() -> None:
    graph = chain(3)
    search = Search(graph, 1 << 60, "test")
    assert search.is_open(1e-3)
    search.offer(store_all_state(search.problem))
    assert not search.is_open(1e-3)
    lost = Search(graph, 1, "test")
    lost.proved_infeasible = True
    assert not lost.is_open(1e-3)
    late = Search(graph, 1 << 60, "test", time_limit_s=0.0)
    assert not late.is_open(1e-3)
    assert late.cut_short


def test_a_search_ends_where_nothing_is_left_that_is_better_than_what_is_known() -> None:
    graph = resnet_like(1)
    budget_bytes = peak_bytes_of(graph) * 85 // 100
    best = solve_within(graph, budget_bytes, gap=0.01, time_limit_s=AMPLE_S)
    assert best.schedule is not None
    again = solve_within(graph, budget_bytes, gap=0.01, known_us=best.time_us, time_limit_s=AMPLE_S)
    assert "No schedule is faster than a known one" in again.message
    assert again.lower_bound_us * (1 + 0.01) >= best.time_us
    # A worse one is no reason to end.
    better = solve_within(
        graph, budget_bytes, gap=0.01, known_us=2 * best.time_us, time_limit_s=AMPLE_S
    )
    assert better.schedule == best.schedule
