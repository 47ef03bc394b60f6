"""The way down from the peak: it comes where repair alone ends, fits, and is the same each time."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.narrow.drawn import narrow_graph
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import simulate
from remat.solver.cuts.initial_solutions import POWERS, offer_budget_continuation
from remat.solver.local_search.repair import Repair
from remat.solver.problem import Problem
from remat.solver.search import Search
from remat.solver.state import store_all_state
from tests.limits import AMPLE_S
from tests.rows import rows
from tests.solver.graphs.tight_cases import tight_cases


@cache
def narrow(seed: int, nodes: int = 120) -> TrainingGraph:
    return narrow_graph(nodes, seed)


def searched(graph: TrainingGraph, budget_bytes: int) -> Search:
    search = Search(graph, budget_bytes, "auto", AMPLE_S)
    offer_budget_continuation(search, store_all_state(search.problem), is_patient=True)
    return search


def share_of_peak(graph: TrainingGraph, percent: int) -> int:
    return int(store_all_state(Problem.of(graph)).peak_bytes.max()) * percent // 100


@pytest.mark.slow
def test_it_comes_down_to_a_budget_at_which_repair_alone_ends() -> None:
    graph = narrow(1, 250)
    budget_bytes = share_of_peak(graph, 80)
    for power in POWERS:
        search = Search(graph, budget_bytes, "auto", AMPLE_S)
        assert not Repair(store_all_state(search.problem), budget_bytes, power, search).run()
    found = searched(graph, budget_bytes).best
    assert found is not None
    assert simulate(graph, found).peak_bytes <= budget_bytes


@pytest.mark.parametrize("seed", rows((0, 2, 3, 4, 5), (0).__eq__))
def test_what_it_offers_fits_and_is_found_again(seed: int) -> None:
    graph = narrow(seed)
    budget_bytes = share_of_peak(graph, 85)
    first, second = (searched(graph, budget_bytes).best for _ in range(2))
    assert first == second
    assert first is not None
    assert simulate(graph, first).peak_bytes <= budget_bytes


def test_on_small_graphs_it_offers_nothing_that_does_not_fit() -> None:
    found = 0
    for graph, budget_bytes, optimum_us in tight_cases(12):
        search = searched(graph, budget_bytes)
        if search.best is not None:
            assert optimum_us is not None
            judged = simulate(graph, search.best)
            assert judged.peak_bytes <= budget_bytes
            assert judged.time_us >= optimum_us * (1 - 1e-9)
            found += 1
    assert found


def test_where_nothing_fits_it_ends() -> None:
    search = searched(narrow(0, 60), 1)
    assert search.best is None
    assert search.proved_infeasible
