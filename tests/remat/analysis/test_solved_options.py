"""A plan is asked again as it was asked."""

from __future__ import annotations

from remat.analysis.why import solve_arguments
from remat.solver import solve_within
from tests.solver.graphs.random_graphs import gpt_like


def test_a_plan_of_three_segments_is_solved_again_with_three() -> None:
    graph = gpt_like(2)
    three = solve_within(graph, 1 << 60, "chen_sqrt", segments=3).schedule
    usual = solve_within(graph, 1 << 60, "chen_sqrt").schedule
    assert three is not None
    assert usual is not None
    asked = solve_arguments(three)
    again = solve_within(graph, 1 << 60, **asked).schedule
    assert asked["segments"] == 3
    assert again is not None
    assert again.steps == three.steps != usual.steps
