"""Lazy cuts and stage rows against exhaustive search: bounds hold, rise, and end."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.solver import solve_within
from remat.solver.backends.mip import Limits
from remat.solver.bounds.cut_program import CutProgram, add_stage_row
from remat.solver.bounds.lazy_cuts import Climbed, LazyCuts, Windows
from remat.solver.problem import Problem
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.rows import rows
from tests.solver.exhaustive import least_time_us
from tests.solver.graphs.random_graphs import training_graphs
from tests.solver.graphs.tight_cases import TightCase, tight_cases

SLACK = 1 + 1e-9


def check_bound(bound_us: float, optimum_us: float | None) -> None:
    """A bound is at most the optimum, so infinite only where nothing fits."""
    if optimum_us is not None:
        assert bound_us <= optimum_us * SLACK, "a bound exceeds the optimum"


def climbed_to_the_end(case: TightCase, first: int) -> LazyCuts:
    """Cuts from one at `first` until nothing is left to add, checked at every step."""
    lazy = LazyCuts(Problem.of(case.graph), case.budget_bytes, (first,))
    most = len(case.graph.ops) ** 2 + 1
    for _ in range(most + 1):
        before, was_exact = (lazy.bound_us, lazy.cuts, lazy.rows), lazy.is_exact
        climbed = lazy.climb(Limits())
        assert lazy.bound_us >= max(before[0], climbed.solution.bound_us)
        check_bound(lazy.bound_us, case.optimum_us)
        assert set(lazy.cuts) >= set(before[1])
        assert set(lazy.rows) >= set(before[2])
        if lazy.is_done:
            assert (lazy.cuts, lazy.rows) == before[1:]
            return lazy
        added = len(lazy.cuts) + len(lazy.rows) - len(before[1]) - len(before[2])
        assert added > 0 or (lazy.is_exact and not was_exact), "neither refined nor made exact"
        assert len(set(lazy.rows)) == len(lazy.rows)
    raise AssertionError(f"not done after {most} climbs")


def full_program(
    graph: TrainingGraph, budget_bytes: int, rows: tuple[tuple[int, int], ...]
) -> float:
    """The bound of a cut at every op with these rows."""
    problem = Problem.of(graph)
    lazy = LazyCuts(problem, budget_bytes, tuple(range(problem.n_ops)), rows)
    return lazy.climb(Limits()).solution.bound_us


def every_row(graph: TrainingGraph) -> tuple[tuple[int, int], ...]:
    """(stage, op) for each op in each stage in which it may run again."""
    return tuple((stage, op) for stage in range(1, len(graph.ops)) for op in range(stage))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_climbing_raises_a_bound_that_holds(seed: int) -> None:
    closed = 0
    cases = tight_cases(15, seed)
    for i, case in enumerate(cases):
        lazy = climbed_to_the_end(case, i % len(case.graph.ops))
        closed += lazy.bound_us * SLACK >= (case.optimum_us or math.inf)
    assert closed >= 0.8 * len(cases), "the bound is weaker than it was"


@settings(max_examples=60, deadline=None)
@given(training_graphs(max_ops=8), st.integers(0, 100), st.integers(0, 7))
def test_any_graph_and_budget_climbs_to_the_end(
    graph: TrainingGraph, percent: int, first: int
) -> None:
    budget_bytes = peak_bytes_of(graph) * percent // 100
    case = TightCase(graph, budget_bytes, least_time_us(graph, budget_bytes))
    climbed_to_the_end(case, first % len(graph.ops))


@pytest.mark.parametrize("seed", rows(range(4), lambda seed: seed < 2))
def test_all_rows_in_all_stages_never_cut_off_the_optimum(seed: int) -> None:
    for graph, budget_bytes, optimum_us in tight_cases(15, seed):
        without_us = full_program(graph, budget_bytes, ())
        with_us = full_program(graph, budget_bytes, every_row(graph))
        check_bound(with_us, optimum_us)
        assert with_us * SLACK >= without_us, "rows weaken the program"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_one_row_at_a_time_never_cuts_off_the_optimum(seed: int) -> None:
    for graph, budget_bytes, optimum_us in tight_cases(4, 100 + seed):
        for row in every_row(graph):
            check_bound(full_program(graph, budget_bytes, (row,)), optimum_us)


def test_rows_of_two_ops_in_one_stage_hold_together() -> None:
    """v0 is an input of op1 and gone when op2 runs again, so it must not count there."""
    ops = (
        Op("op0", "t", "forward", (), ("v0",), 7.0),
        Op("op1", "t", "forward", ("v0",), ("v1",), 3.0, workspace_bytes=2),
        Op("op2", "t", "forward", ("v1",), ("v2", "w2"), 3.0),
        Op("op3", "t", "backward", ("v0", "v2"), ("v3",), 6.0),
        Op("op4", "t", "backward", ("w2",), ("v4",), 2.0),
    )
    sizes = {"v0": 5, "v1": 3, "v2": 0, "w2": 7, "v3": 6, "v4": 2}
    values = tuple(Value(name, size, f"op{name[1]}") for name, size in sizes.items())
    graph = TrainingGraph("two rows", ops, values, ("v1",), ("v0", "v4"))
    optimum_us = least_time_us(graph, 11)
    assert optimum_us == 41
    check_bound(full_program(graph, 11, every_row(graph)), optimum_us)


@pytest.mark.parametrize("seed", rows(range(4), lambda seed: seed < 2))
def test_proofs_that_nothing_fits_are_right(seed: int) -> None:
    """Relaxed and integer programs of every single cut and of all; some proofs are found."""
    proved = 0
    for graph, budget_bytes, optimum_us in tight_cases(6, 200 + seed):
        problem = Problem.of(graph)
        everywhere = tuple(range(problem.n_ops))
        for cuts in (*((t,) for t in everywhere), everywhere):
            program = CutProgram(problem, cuts, budget_bytes)
            for solution in (program.relaxed(9.0), program.solve(Limits())):
                if solution.bound_us == math.inf:
                    assert optimum_us is None
                    assert solution.values is None
                    proved += 1
    assert proved


@functools.cache
def crowded() -> TrainingGraph:
    """r needs workspace when it runs again: beside x, which is dear, there is no room for it.

    At 10 bytes x or r cannot stay while big runs. Between cuts r costs 1 us; but while it runs
    again before the last op, r, its workspace and x take 11 bytes. So x, at 100 us, must go.
    """
    ops = (
        Op("r", "t", "forward", (), ("r",), 1.0, workspace_bytes=4),
        Op("x", "t", "forward", (), ("x",), 100.0),
        Op("big", "t", "forward", (), ("big",), 1.0),
        Op("last", "t", "backward", ("x", "r"), ("end",), 1.0),
    )
    sizes = {"r": 3, "x": 4, "big": 6, "end": 0}
    producers = {"r": "r", "x": "x", "big": "big", "end": "last"}
    values = tuple(Value(name, size, producers[name]) for name, size in sizes.items())
    return TrainingGraph("crowded", ops, values)


def test_a_stage_row_raises_the_bound_to_the_optimum() -> None:
    graph = crowded()
    assert least_time_us(graph, 10) == graph.time_us + 100
    assert full_program(graph, 10, ()) == pytest.approx(graph.time_us + 1)
    assert full_program(graph, 10, ((3, 0),)) == pytest.approx(graph.time_us + 100)
    assert full_program(graph, 11, every_row(graph)) == pytest.approx(graph.time_us + 1)


def test_climbing_finds_that_row_by_itself() -> None:
    lazy = climbed_to_the_end(TightCase(crowded(), 10, 203.0), 2)
    assert lazy.rows == ((3, 0),)
    assert lazy.bound_us == pytest.approx(203)
    assert solve_within(crowded(), 10, "cut").status == "optimal"


def test_rows_that_say_nothing_leave_the_program_as_it_is() -> None:
    """In the first stage, where the stage has no cut before it, or the op cannot run again."""
    problem = Problem.of(crowded())
    program = CutProgram(problem, (0, 2, 3), 10)
    size = (len(program.program.rows), len(program.program.objective))
    for k, op in ((0, 0), (1, 0), (2, 2), (2, 3)):
        add_stage_row(program, k, op)
        assert (len(program.program.rows), len(program.program.objective)) == size
    add_stage_row(program, 2, 0)
    assert len(program.program.rows) > size[0]


def test_points_that_cost_more_than_asked_are_left_out_and_no_bound_is_wrong() -> None:
    closed = 0
    for case in tight_cases(23, 2):
        if case.optimum_us is None:
            continue
        problem = Problem.of(case.graph)
        for part in (0.9, 1 - 1e-6, 1 + 1e-6):
            lazy = LazyCuts(problem, case.budget_bytes, (problem.n_ops // 2,))
            climbed = lazy.climb(Limits(), part * case.optimum_us)
            check_bound(climbed.solution.bound_us, case.optimum_us)
            assert climbed.solution.bound_us <= part * case.optimum_us
            closed += climbed.start is None
        every = LazyCuts(problem, case.budget_bytes, tuple(range(problem.n_ops)))
        check_bound(every.climb(Limits(), case.optimum_us / 2).solution.bound_us, case.optimum_us)
    assert closed > 5, "hardly a program had no point"


def test_a_program_that_a_limit_ended_gets_more_of_it_and_asks_for_less() -> None:
    """The whole step is one window: as any other, it is not solved again with the same limit."""
    case = next(case for case in tight_cases(23, 2) if case.optimum_us is not None)
    problem = Problem.of(case.graph)
    asked: list[tuple[int | None, float]] = []

    class Late(LazyCuts):
        def climb(self, limits: Limits, below_us: float = math.inf) -> Climbed:
            asked.append((limits.node_limit, below_us))
            found = LazyCuts.climb(self, Limits())
            return Climbed(replace(found.solution, finished=False), found.start)

    windows = Windows(problem, [Late(problem, case.budget_bytes, (problem.n_ops // 2,))])
    for _ in range(3):
        windows.climb(Limits(node_limit=10), 500.0)
    assert asked == [(10, math.inf), (20, 500.0), (40, 500.0)]


def test_relaxed_points_add_cuts_and_no_bound_is_wrong() -> None:
    """Each point says more, or as much; the work ends it too."""
    raised = 0
    for case in tight_cases(23, 4):
        lazy = LazyCuts(Problem.of(case.graph), case.budget_bytes, (len(case.graph.ops) // 2,))
        first_us = lazy.program().relaxed(AMPLE_S).bound_us
        for _ in lazy.climb_relaxed(4, 1000, AMPLE_S):
            check_bound(lazy.bound_us, case.optimum_us)
        assert len(lazy.cuts) <= 4
        raised += first_us < lazy.bound_us < math.inf
        one = LazyCuts(Problem.of(case.graph), case.budget_bytes, lazy.cuts[:1])
        assert len(list(one.climb_relaxed(4, 1, AMPLE_S))) <= 1
    assert raised > 2, "more cuts hardly say more"
