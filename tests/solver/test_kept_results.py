"""What solves of one graph share."""

from __future__ import annotations

import pickle

import msgspec

from remat.graph_capture.graph import PREFIX, cached_on
from remat.solver import solve_within
from remat.solver.problem import Problem
from tests.solver.graphs.traced_gpt import traced_gpt


def test_what_is_kept_is_made_once_and_stays_with_its_graph() -> None:
    graph = traced_gpt("fused")
    made: list[int] = []

    def make() -> list[int]:
        made.append(1)
        return made

    assert cached_on(graph, "x", make) is cached_on(graph, "x", make) is made
    assert made == [1]
    assert Problem.of(graph) is Problem.of(graph)
    for other in (pickle.loads(pickle.dumps(graph)), msgspec.structs.replace(graph)):
        assert other == graph
        assert not any(name.startswith(PREFIX) for name in vars(other))
        assert Problem.of(other) is not Problem.of(graph)


def test_a_second_solve_that_shares_finds_the_same_schedule() -> None:
    graph = traced_gpt("fused")
    budget_bytes = int(0.8 * solve_within(graph, 1 << 60, "store_all").peak_bytes)
    first, second = (solve_within(graph, budget_bytes, "hierarchical") for _ in range(2))
    assert first.schedule is not None
    assert second.schedule == first.schedule
    alone = solve_within(msgspec.structs.replace(graph), budget_bytes, "hierarchical")
    assert alone.schedule == first.schedule


def test_options_of_blocks_that_time_cut_short_are_not_kept() -> None:
    graph = traced_gpt("fused")
    budget_bytes = int(0.8 * solve_within(graph, 1 << 60, "store_all").peak_bytes)
    solve_within(graph, budget_bytes, "hierarchical", time_limit_s=0.0)
    fresh = solve_within(msgspec.structs.replace(graph), budget_bytes, "hierarchical")
    assert solve_within(graph, budget_bytes, "hierarchical").schedule == fresh.schedule
