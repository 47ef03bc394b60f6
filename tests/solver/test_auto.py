"""`auto` on graphs that cuts alone do not close: the same plan twice, gaps and interrupts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from remat.graph_capture.errors import SolverError
from remat.solver import Progress, make_solver, solve_within
from remat.solver.auto import Improvement
from remat.solver.bounds.lazy_cuts import Windows
from remat.solver.cuts.cut import begin
from remat.solver.search import Search
from remat.solver.state import store_all_state
from tests.limits import AMPLE_S
from tests.solver.graphs.random_graphs import chain
from tests.solver.layered_search import (
    AROUND,
    GAP,
    budget_bytes,
    found,
    layered,
    schedule_of,
)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_seed_and_workers_give_the_same_schedule_twice(workers: int) -> None:
    assert schedule_of(0, workers) == schedule_of(0, workers, attempt=1)


@pytest.mark.slow
def test_seed_and_workers_give_the_same_schedule_in_another_process() -> None:
    code = (
        "from tests.solver.layered_search import schedule_of\n"
        "import sys; sys.stdout.buffer.write(schedule_of(0, 2))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": "."}, check=True, capture_output=True,
    )  # fmt: skip
    assert ran.stdout == schedule_of(0, 2)


def test_a_schedule_carries_the_options_that_made_it() -> None:
    result, _ = found(gap=0.5, seed=5, workers=1)
    assert result.schedule is not None
    options = result.schedule.options
    assert (options["gap"], options["seed"], options["workers"]) == (0.5, 5, 1)


@pytest.mark.parametrize("gap", [0.5, 0.1, 0.04, 0.02])
def test_the_search_ends_at_the_gap_that_is_asked_for(gap: float) -> None:
    result, heard = found(gap)
    assert result.schedule is not None
    assert result.gap <= gap
    first, *later = [told for told in heard if _gap(told) <= gap]
    if AROUND not in first.doing:
        assert not any(AROUND in told.doing for told in later), "a search without need"


def _gap(told: Progress) -> float:
    if told.best_overhead is None:
        return float("inf")
    return (1 + told.best_overhead) / (1 + told.bound_overhead) - 1


def test_what_is_told_only_improves() -> None:
    _, heard = found()
    best = [told.best_overhead for told in heard if told.best_overhead is not None]
    bounds = [told.bound_overhead for told in heard]
    assert best == sorted(best, reverse=True)
    assert bounds == sorted(bounds)
    assert all(bounds[-1] <= overhead * (1 + 1e-9) for overhead in best)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"workers": 0}, "workers must be 1 or more, not 0"),
        ({"workers": -2}, "workers must be 1 or more, not -2"),
        ({"gap": "little"}, "gap must be 0 or more, not little"),
        ({"gap": -0.1}, "gap must be 0 or more, not -0.1"),
        ({"gap": float("nan")}, "gap must be 0 or more, not nan"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SolverError, match=text):
        make_solver("auto", **options)
    with pytest.raises(SolverError, match=text):
        solve_within(layered(), budget_bytes(), **options)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_improvement_brings_bound_and_schedule_together(workers: int) -> None:
    search = Search(layered(), budget_bytes(), "test", AMPLE_S)
    lazy = begin(search, store_all_state(search.problem), GAP)
    assert lazy is not None
    first_us, first_bound_us = search.best_key[0], search.bound_us
    improvement = Improvement(search, Windows(search.problem, [lazy]), GAP, workers=workers)
    improvement.run()
    result = search.result()
    assert result.gap <= GAP < first_us / first_bound_us - 1
    assert first_bound_us <= result.lower_bound_us <= result.time_us < first_us
    assert improvement.around is not None
    assert improvement.around.workers == max(workers - 1, 1)


def test_an_improvement_that_is_not_needed_does_nothing() -> None:
    search = Search(layered(), budget_bytes(), "test", AMPLE_S)
    lazy = begin(search, store_all_state(search.problem), GAP)
    assert lazy is not None
    before = (search.best, lazy.cuts, lazy.rows)
    improvement = Improvement(search, Windows(search.problem, [lazy]), gap=1.0)
    improvement.run()
    assert (search.best, lazy.cuts, lazy.rows) == before
    assert improvement.around is None


@pytest.mark.parametrize("percent", [25, 30])
def test_on_a_chain_it_is_at_once_as_fast_as_the_solver_of_chains(percent: int) -> None:
    """What comes after takes long: Ctrl-C ends it."""
    graph = chain(30)
    budget = solve_within(graph, 1 << 60, "store_all").peak_bytes * percent // 100

    def stop(told: Progress) -> None:
        if told.doing.startswith("planning as"):
            raise KeyboardInterrupt

    of_chains = solve_within(graph, budget, "rotor")
    assert solve_within(graph, budget, progress=stop).time_us <= of_chains.time_us * (1 + 1e-9)
