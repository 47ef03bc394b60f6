"""What a program of cuts comes to can always be made into a schedule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from remat.solver.bounds.cut_program import CutProgram, expand
from remat.solver.problem import Problem
from remat.solver.state import State, UnreachableError
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.rows import rows
from tests.solver.graphs.random_graphs import random_graph

N_OPS = 60


@pytest.mark.parametrize("seed", rows(range(60), {7, 10, 12, 28, 48}.__contains__))
def test_a_relaxed_point_is_rounded_to_a_state_that_keeps_what_must_run_once(seed: int) -> None:
    source = random.Random(seed)
    graph = random_graph(source, N_OPS, 40)
    problem, peak_bytes = Problem.of(graph), peak_bytes_of(graph)
    for percent in (30, 50, 70, 90):
        for n_cuts in (1, 3, 6):
            cuts = tuple(sorted(source.sample(range(2, N_OPS - 2), n_cuts)))
            budget_bytes = peak_bytes * percent // 100
            point = CutProgram(problem, cuts, budget_bytes).relaxed(AMPLE_S)
            if point.values is not None:
                runs = expand(point)
                assert not any(problem.no_recompute[op] for stage in runs for op in stage)
                State.from_recomputed(problem, runs)


@pytest.mark.slow
def test_a_half_of_a_value_needs_all_of_its_inputs_once_it_is_rounded_away() -> None:
    source = random.Random(7)
    graph = random_graph(source, N_OPS, 40)
    problem, peak_bytes = Problem.of(graph), peak_bytes_of(graph)
    for _ in range(40):
        cuts = tuple(sorted(source.sample(range(2, N_OPS - 2), 6)))
        point = CutProgram(problem, cuts, peak_bytes * 3 // 10).relaxed(AMPLE_S)
        if point.values is None:
            continue
        try:
            expand(replace(point, is_relaxed=False))
        except UnreachableError:
            expand(point)
            return
    raise AssertionError("no point among these rounds to what must run once twice")
