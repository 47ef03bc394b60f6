"""Bounds on the peak: against exhaustive search, closed formulas and the simulator."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import Op, Resident, TrainingGraph, Value
from remat.solver import solve_within
from remat.solver.bounds.least_peak import floor_of, least_peak_bound_bytes
from remat.solver.problem import Problem
from tests.limits import AMPLE_S
from tests.solver.exhaustive import least_time_us
from tests.solver.graphs.random_graphs import (
    chain,
    gpt_like,
    random_graph,
    resnet_like,
    training_graphs,
    unet_like,
)


def largest_working_set_bytes(problem: Problem) -> int:
    sets = [problem.working_set_bytes[t] for t in range(problem.n_ops)]
    return max(sets) + problem.resident_bytes


def least_peak_bytes(graph: TrainingGraph) -> int:
    """The least budget with a schedule, by bisection with the oracle."""
    low, high = 0, solve_within(graph, 1 << 60, "store_all").peak_bytes
    while low < high:
        middle = (low + high) // 2
        if least_time_us(graph, middle) is None:
            low = middle + 1
        else:
            high = middle
    return low


def step(*ops: tuple[str, int], reads: dict[str, tuple[str, ...]], keeps: tuple[str, ...] = (),
         pinned: tuple[str, ...] = ()) -> TrainingGraph:  # fmt: skip
    """A graph of forward ops that make one value each, of the sizes given."""
    why = ("", "has an effect")
    return TrainingGraph(
        "step",
        tuple(
            Op(name, "t", "forward", reads.get(name, ()), (name,), 1.0, 0, why[name in pinned])
            for name, _ in ops
        ),
        tuple(Value(name, size_bytes, name) for name, size_bytes in ops),
        outputs=keeps,
        resident=Resident(parameters_bytes=100),
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(training_graphs(max_ops=7))
def test_the_bound_is_never_above_the_least_peak(graph: TrainingGraph) -> None:
    problem = Problem.of(graph)
    least_bytes = least_peak_bytes(graph)
    bounds = [least_peak_bound_bytes(problem, effort) for effort in (0, 5, 2000)]
    assert largest_working_set_bytes(problem) <= bounds[0]
    assert bounds == sorted(bounds)
    assert bounds[-1] <= least_bytes


def test_the_bound_is_nearly_always_the_least_peak_of_a_tiny_graph() -> None:
    source = random.Random(1)
    equal = 0
    for _ in range(100):
        n_ops = source.randint(3, 7)
        graph = random_graph(source, n_ops, source.randint(0, n_ops))
        equal += least_peak_bound_bytes(Problem.of(graph)) == least_peak_bytes(graph)
    assert equal >= 95


@settings(max_examples=60, deadline=None)
@given(training_graphs(max_ops=14))
def test_the_floor_is_between_working_set_and_store_all(graph: TrainingGraph) -> None:
    problem = Problem.of(graph)
    floor = floor_of(problem)
    kept_bytes = solve_within(graph, 1 << 60, "store_all").peak_bytes
    assert largest_working_set_bytes(problem) <= floor.size_bytes <= kept_bytes
    assert floor.name == "" or floor.name in graph.op_index


def test_the_floor_counts_outputs_made_before() -> None:
    graph = step(
        ("a", 5), ("b", 3), ("c", 20), ("d", 1), reads={"c": ("b",)}, keeps=("a", "b", "d")
    )
    floor = floor_of(Problem.of(graph))
    assert (floor.size_bytes, floor.name) == (100 + 5 + 3 + 20, "c")


def test_what_is_made_last_has_all_the_others_beside_it() -> None:
    """Outputs of 5 and 7 bytes; the first needs an input of 9, the second one of 8."""
    graph = step(("x", 9), ("a", 5), ("y", 8), ("b", 7), reads={"a": ("x",), "b": ("y",)},
                 keeps=("a", "b"))  # fmt: skip
    made_last = {"a": 9 + 5 + 7, "b": 8 + 7 + 5}
    assert floor_of(Problem.of(graph)).size_bytes == 100 + made_last["b"]
    assert least_peak_bound_bytes(Problem.of(graph)) == 100 + min(made_last.values())
    assert least_peak_bytes(graph) == 100 + min(made_last.values())


def test_recomputing_an_output_can_beat_the_floor() -> None:
    """`a` is small to make again after the large `c` is gone."""
    graph = step(("a", 6), ("c", 20), ("d", 1), reads={"d": ("c",)}, keeps=("a", "d"))
    assert floor_of(Problem.of(graph)).size_bytes == 100 + 6 + 20 + 1
    assert least_peak_bound_bytes(Problem.of(graph)) == least_peak_bytes(graph) == 100 + 20 + 1


def test_a_pinned_output_stays() -> None:
    graph = step(
        ("a", 6), ("c", 20), ("d", 1), reads={"d": ("c",)}, keeps=("a", "d"), pinned=("a",)
    )
    assert least_peak_bound_bytes(Problem.of(graph)) == least_peak_bytes(graph) == 100 + 27


@pytest.mark.parametrize("graph", [resnet_like(4), unet_like(2), gpt_like(1), chain(8)])
def test_no_schedule_known_has_a_lower_peak(graph: TrainingGraph) -> None:
    problem = Problem.of(graph)
    known = solve_within(graph, 0, "cut", time_limit_s=AMPLE_S)
    assert least_peak_bound_bytes(problem) <= known.least_feasible_bytes
    assert least_peak_bound_bytes(problem) == least_peak_bound_bytes(problem)


def test_the_bound_of_a_residual_net_is_reached() -> None:
    graph = resnet_like(4)
    bound_bytes = least_peak_bound_bytes(Problem.of(graph))
    assert bound_bytes == solve_within(graph, 0, "cut").least_feasible_bytes < floor_of(
        Problem.of(graph)
    ).size_bytes  # fmt: skip


def test_a_negative_effort_is_refused() -> None:
    with pytest.raises(SolverError, match="effort must be 0 or more, not -1"):
        least_peak_bound_bytes(Problem.of(chain(2)), -1)
