"""Windows against exhaustive search: their sum is a bound, merging keeps it and ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.narrow.drawn import narrow_graph
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.solver.backends.mip import Limits
from remat.solver.bounds.lazy_cuts import LazyCuts, Windows, first_cuts, windows_of
from remat.solver.problem import Problem
from remat.solver.state import store_all_state
from tests.graphs import peak_bytes_of
from tests.rows import rows
from tests.solver.exhaustive import least_time_us
from tests.solver.graphs.humps import humps
from tests.solver.graphs.random_graphs import training_graphs
from tests.solver.graphs.tight_cases import tight_cases

SLACK = 1 + 1e-6


def split_at(problem: Problem, budget_bytes: int, borders: list[int]) -> Windows:
    """A window with one cut between each two of `borders`, the first at 0."""
    ends = [*borders[1:], None]
    return Windows(
        problem,
        [
            LazyCuts(problem, budget_bytes, (begin,), begin=begin, end=end)
            for begin, end in zip(borders, ends, strict=True)
        ],
    )


def climbed_to_the_end(windows: Windows, optimum_us: float | None) -> float:
    """The last bound; each on the way is at most the optimum, none is lower than one before."""
    n_ops = windows.problem.n_ops
    for _ in range(4 * n_ops * n_ops + 8):
        before_us = windows.bound_us
        windows.climb(Limits(absolute_gap=0.0))
        assert windows.bound_us >= before_us
        if optimum_us is not None:
            assert windows.bound_us <= optimum_us * SLACK, "a bound exceeds the optimum"
        ends = [part.end for part in windows.parts]
        assert [part.begin for part in windows.parts[1:]] == ends[:-1]
        assert ends[-1] is None
        if windows.is_done:
            return windows.bound_us
        if windows.bound_us == float("inf"):
            return windows.bound_us
    raise AssertionError("the windows do not end")


@settings(max_examples=60, deadline=None)
@given(training_graphs(max_ops=8), st.integers(0, 100), st.sets(st.integers(1, 7)))
def test_any_windows_of_any_graph_bound_its_optimum(
    graph: TrainingGraph, percent: int, borders: set[int]
) -> None:
    budget_bytes = peak_bytes_of(graph) * percent // 100
    inside = [0, *sorted(t for t in borders if t < len(graph.ops))]
    windows = split_at(Problem.of(graph), budget_bytes, inside)
    climbed_to_the_end(windows, least_time_us(graph, budget_bytes))


@pytest.mark.parametrize("seed", rows(range(4), lambda seed: seed < 1))
def test_merged_windows_close_what_cuts_close(seed: int) -> None:
    closed = 0
    cases = tight_cases(8, 300 + seed)
    for graph, budget_bytes, optimum_us in cases:
        windows = split_at(Problem.of(graph), budget_bytes, [0, 2, len(graph.ops) - 1])
        bound_us = climbed_to_the_end(windows, optimum_us)
        closed += bound_us * SLACK >= (optimum_us or float("inf"))
    assert closed >= 0.8 * len(cases), "the bound is weaker than it was"


@pytest.mark.parametrize("seed", range(6))
def test_small_narrow_graphs_are_bounded_by_their_own_windows(seed: int) -> None:
    graph = narrow_graph(11, seed)
    budget_bytes = peak_bytes_of(graph) * 85 // 100
    plain = store_all_state(Problem.of(graph))
    windows = windows_of(plain.problem, budget_bytes, plain.peak_bytes)
    climbed_to_the_end(windows, least_time_us(graph, budget_bytes))


def test_bounds_of_windows_add_up_before_any_merge() -> None:
    """At 9 bytes a or b must go in each hump: a, which costs 5 us."""
    graph = humps(3)
    plain = store_all_state(Problem.of(graph))
    windows = windows_of(plain.problem, 9, plain.peak_bytes)
    assert [part.cuts for part in windows.parts] == [(2,), (6,), (10,)]
    starts = [windows.climb(Limits()).start for _ in windows.parts]
    assert windows.bound_us == pytest.approx(graph.time_us + 15)
    assert starts[:2] == [None, None]
    assert starts[2] is not None
    assert starts[2].cost_us == 15
    assert starts[2].peak_bytes.max() == 9
    assert least_time_us(humps(2), 9) == humps(2).time_us + 10


def test_a_merged_program_has_a_row_of_what_was_proved_of_its_parts() -> None:
    graph = humps(2)
    plain = store_all_state(Problem.of(graph))
    windows = windows_of(plain.problem, 9, plain.peak_bytes)
    while len(windows.parts) > 1:
        windows.climb(Limits())
    (merged,) = windows.parts
    assert merged.floors == (
        (2, 6, pytest.approx(5)),
        (6, len(graph.ops), pytest.approx(5)),
    )
    relaxed = merged.program().relaxed(9.0)
    assert relaxed.bound_us == pytest.approx(graph.time_us + 10, rel=1e-5)


def test_the_window_furthest_from_what_is_spent_comes_first() -> None:
    graph = humps(3)
    plain = store_all_state(Problem.of(graph))
    windows = windows_of(plain.problem, 9, plain.peak_bytes)
    for part in windows.parts:
        part.bound_us = graph.time_us
    windows.spent_us = [0.0] * 7 + [5.0] + [0.0] * 5
    windows.climb(Limits())
    assert [part.bound_us > graph.time_us for part in windows.parts] == [False, True, False]


def test_full_stages_that_share_what_is_live_are_one_window() -> None:
    """x, of most bytes, lives through both humps."""
    ops = (
        Op("x", "t", "forward", (), ("x",), 9.0),
        Op("p", "t", "forward", (), ("p",), 1.0),
        Op("q", "t", "forward", (), ("q",), 1.0),
        Op("s", "t", "forward", (), ("s",), 1.0),
        Op("r", "t", "forward", (), ("r",), 1.0),
        Op("end", "t", "forward", ("x",), ("end",), 1.0),
    )
    sizes = {"x": 6, "p": 4, "q": 1, "s": 1, "r": 4, "end": 0}
    graph = TrainingGraph("one", ops, tuple(Value(v, size, v) for v, size in sizes.items()))
    plain = store_all_state(Problem.of(graph))
    (window,) = windows_of(plain.problem, 9, plain.peak_bytes).parts
    assert window.cuts == (1, 4)


def test_first_cuts_are_the_fullest_and_not_near_each_other() -> None:
    peak_bytes = store_all_state(Problem.of(humps(3))).peak_bytes
    assert first_cuts(peak_bytes, [1, 2, 3, 6, 10]) == [2, 6, 10]
    assert first_cuts(peak_bytes, []) == []
