"""Where memory is full in several places, windows take the place of one cut."""

from __future__ import annotations

import msgspec
import pytest

from remat.graph_capture.graph import TrainingGraph
from remat.solver import solve_within
from remat.solver.auto import Improvement
from remat.solver.cuts.cut import begin_window_cuts
from remat.solver.search import Search
from remat.solver.state import store_all_state
from tests.limits import AMPLE_S
from tests.solver.graphs.humps import humps
from tests.solver.layered_search import GAP, budget_bytes, layered


def search_of(graph: TrainingGraph, limit_bytes: int) -> Search:
    return Search(graph, limit_bytes, "test", AMPLE_S)


def test_windows_of_separate_humps_end_at_the_optimum() -> None:
    """Five cuts would do for three humps."""
    graph = humps(8)
    search = search_of(graph, 9)
    windows = begin_window_cuts(search, store_all_state(search.problem), 1e-3, has_start=False)
    assert windows is not None
    assert len(windows.parts) > 1
    result = search.result()
    assert result.status == "optimal"
    assert result.time_us == graph.time_us + 40


def test_one_cut_stays_the_only_window_where_full_stages_share_most() -> None:
    search = search_of(layered(), budget_bytes())
    windows = begin_window_cuts(search, store_all_state(search.problem), GAP, has_start=False)
    assert windows is not None
    (window,) = windows.parts
    assert len(window.cuts) > 1, "one cut, and what points violate"
    assert windows.bound_us == window.bound_us == search.bound_us
    assert windows.start is not None, "neighbourhoods begin without a guide"
    guided = Improvement(search, windows, GAP).guide
    assert guided == windows.start.runs
    assert any(guided)


def test_one_cut_stays_where_one_window_says_nearly_all() -> None:
    """After the first hump, what must go costs nothing."""
    graph, replace = humps(3), msgspec.structs.replace
    ops = tuple(op if op.name in {"a0", "b0"} else replace(op, cost_us=0.0) for op in graph.ops)
    search = search_of(replace(graph, ops=ops), 9)
    windows = begin_window_cuts(search, store_all_state(search.problem), 1e-3, has_start=False)
    assert windows is not None
    (window,) = windows.parts
    assert window.cuts[0] == 2


def test_no_windows_are_asked_of_a_step_that_cannot_fit() -> None:
    search = search_of(humps(2), 5)
    assert begin_window_cuts(search, store_all_state(search.problem), 1e-3, has_start=False) is None
    assert search.proved_infeasible


@pytest.mark.parametrize("workers", [1, 2])
def test_auto_closes_the_gap_of_separate_humps(workers: int) -> None:
    graph = humps(12)
    result = solve_within(graph, 9, workers=workers, time_limit_s=AMPLE_S)
    assert result.status == "optimal"
    assert result.time_us == graph.time_us + 60
