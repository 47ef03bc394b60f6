"""Fronts: monotone, with bounds that hold, the same by one process, several and a cluster."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from remat.formats import GIB
from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.solver import Result, solve_within
from remat.solver.budgets import sweep
from remat.solver.budgets.front import Front
from remat.solver.budgets.sweep import (
    least_peak,
    merge_results,
    price_of_gib,
    spread_budgets,
    sweep_budgets,
)
from remat.solver.cuts.cut import Cut
from remat.solver.problem import Problem, least_needed_bytes
from remat.solver.search import note_interrupt, one_job
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S, LateClock
from tests.solver.checks import check_front
from tests.solver.graphs.random_graphs import chain, resnet_like


@functools.cache
def graph_of() -> TrainingGraph:
    return chain(14)


@functools.cache
def front() -> Front:
    return sweep_budgets(graph_of(), 6, "cut", time_limit_s=AMPLE_S)


def facts(found: Front) -> list[tuple[object, ...]]:
    """All of a front but the seconds it took."""
    return [
        (b, r.status, r.peak_bytes, r.time_us, r.lower_bound_us, r.schedule and r.schedule.steps)
        for b, r in found.points
    ]


def test_a_front_runs_from_the_least_peak_to_the_unmodified_one() -> None:
    budgets = [budget_bytes for budget_bytes, _ in front().points]
    assert len(front()) == 6
    assert budgets == spread_budgets(graph_of(), 6)[0]
    assert (
        budgets[0]
        == solve_within(graph_of(), 0, "cut").least_feasible_bytes
        >= least_needed_bytes(Problem.of(graph_of()))
    )
    assert budgets[-1] == front().unmodified_bytes
    assert front().points[-1].result.overhead == 0
    assert front().points[0].result.overhead > 0
    check_front(graph_of(), front())


@pytest.mark.parametrize(
    "solver", [pytest.param("auto", marks=pytest.mark.slow), "chen_sqrt", "store_all"]
)
def test_every_solver_has_a_monotone_front(solver: str) -> None:
    graph = resnet_like(2)
    check_front(graph, sweep_budgets(graph, 4, solver, time_limit_s=AMPLE_S))


def test_a_schedule_serves_larger_budgets_and_a_bound_smaller_ones() -> None:
    graph = graph_of()
    budgets = [b for b, _ in front().points]
    tight, loose = (Cut().solve(graph, budgets[i]) for i in (2, 4))
    assert tight.schedule is not None
    blind = Result("time limit", "cut", budgets[3], lower_bound_us=graph.time_us)
    low, middle, high = merge_results(graph, [tight, blind, loose])
    assert middle.time_us == tight.time_us
    assert middle.schedule is not None
    assert middle.schedule.steps == tight.schedule.steps
    assert middle.lower_bound_us == loose.lower_bound_us
    assert (low.time_us, high.time_us) == (tight.time_us, loose.time_us)
    lost = Result("infeasible", "cut", budgets[1], lower_bound_us=0.0)
    assert merge_results(graph, [lost, tight])[0].schedule is None


@pytest.mark.slow
def test_sweeps_side_by_side_equal_one_by_one() -> None:
    graph, budgets = chain(10), 3
    alone = sweep_budgets(graph, budgets, "cut", time_limit_s=AMPLE_S)
    assert facts(sweep_budgets(graph, budgets, "cut", time_limit_s=AMPLE_S, jobs=2)) == facts(alone)


@pytest.mark.slow
def test_a_sweep_on_a_dask_cluster_equals_one_by_one() -> None:
    distributed = pytest.importorskip("distributed", reason="dask is not installed")
    joblib = pytest.importorskip("joblib")
    cluster = distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address=None,
    )  # fmt: skip
    with cluster, distributed.Client(cluster), joblib.parallel_config(backend="dask"):
        far = sweep_budgets(chain(10), 3, "cut", time_limit_s=AMPLE_S, jobs=2)
    assert facts(far) == facts(sweep_budgets(chain(10), 3, "cut", time_limit_s=AMPLE_S))


def test_pins_hold_in_a_sweep() -> None:
    graph = msgspec.structs.replace(
        chain(8),
        ops=tuple(msgspec.structs.replace(op, module="body.a") for op in chain(8).ops),
    )
    found = sweep_budgets(graph, 3, "cut", time_limit_s=AMPLE_S, keep="body")
    for _, result in found.points:
        assert result.schedule is not None
        assert result.overhead == 0


def test_an_interrupted_sweep_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Cut, "run", interrupt)
    budgets = [int(share * front().unmodified_bytes) for share in (0.5, 0.7)]
    found = sweep_budgets(graph, budgets, "cut", time_limit_s=AMPLE_S)
    assert [result.status for _, result in found.points] == ["time limit"] * 2
    assert found.points[1].result.message.startswith("interrupted")
    assert found.points[1].result.lower_bound_us == graph.time_us


def test_a_front_survives_json_and_prints_a_line_a_point() -> None:
    assert Front.from_json(front().to_json()) == front()
    lines = repr(front()).splitlines()
    assert "unmodified peak" in lines[0]
    assert len(lines) == 2 + len(front())
    with pytest.raises(SolverError, match="not a front of a sweep of this release"):
        Front.from_json("{}")


def test_the_price_on_a_front_is_that_of_its_schedules() -> None:
    (low, first), (high, second) = front().points[2:4]
    price = front().price_of_gib(low, high - low)
    assert price.saved_us == first.time_us - second.time_us
    assert price.saved == pytest.approx(price.saved_us / first.time_us)
    assert front().price_of_gib(high, high - low).cost_us == price.saved_us
    least = front().points[0].result
    assert front().price_of_gib(least.budget_bytes).cost is None
    assert "does not fit" in repr(front().price_of_gib(least.budget_bytes))
    assert front().price_of_gib(low).step_bytes == min(GIB, first.peak_bytes // 20)
    with pytest.raises(SolverError, match=f"no schedule of this front fits {least.peak_bytes - 1}"):
        front().price_of_gib(least.peak_bytes - 1)


def test_the_price_of_a_gib_is_that_of_real_solves() -> None:
    graph, step_bytes = graph_of(), 3 << 20
    here = solve_within(graph, int(0.6 * front().unmodified_bytes), "cut")
    price = price_of_gib(graph, here, solver="cut", step_bytes=step_bytes)
    more, less = (
        solve_within(graph, here.budget_bytes + sign * step_bytes, "cut") for sign in (1, -1)
    )
    assert price.saved_us == here.time_us - more.time_us > 0
    assert price.cost_us == less.time_us - here.time_us > 0
    kept = solve_within(graph, 1 << 40, "cut")
    price = price_of_gib(graph, kept, solver="cut")
    assert (price.saved_us, price.cost_us) == (0, 0)


def test_the_price_of_what_cannot_be() -> None:
    graph = graph_of()
    least = least_peak(graph, solver="cut")
    assert least.schedule is not None
    assert least.peak_bytes <= least.budget_bytes == front().points[0].budget_bytes
    price = price_of_gib(graph, least, solver="cut", step_bytes=least.peak_bytes // 2)
    assert price.cost is None
    assert price.saved > 0
    lost = solve_within(graph, 1, "cut")
    with pytest.raises(SolverError, match=f"ask at {least.budget_bytes} bytes"):
        price_of_gib(graph, lost)
    with pytest.raises(SolverError, match="step_bytes must be 0"):
        price_of_gib(graph, least, step_bytes=-1)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"budgets": 0}, "ask for 1 budget or more, not 0"),
        ({"budgets": []}, "budgets must be one or more sizes"),
        ({"jobs": 0}, "jobs must be 1 or more, or -1 for every core, not 0"),
        ({"solver": "cutt"}, "did you mean cut"),
        ({"solver": "cut", "gapp": 1}, "no option 'gapp'"),
    ],
)
def test_bad_sweeps_are_refused_before_any_solve(words: dict[str, object], text: str) -> None:
    with pytest.raises(SolverError, match=text):
        sweep_budgets(graph_of(), **words)  # type: ignore[arg-type]


def test_when_time_is_up_every_budget_has_a_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, late = resnet_like(4), LateClock(monkeypatch)
    budgets = [peak_bytes_of(graph) * percent // 100 for percent in (60, 70, 80)]

    def after_the_first(done: int, total: int) -> None:
        if done:
            late.end()

    found = sweep_budgets(graph, budgets, gap=0.0, time_limit_s=AMPLE_S, progress=after_the_first)
    assert any(result.status == "time limit" for _, result in found.points)
    check_front(graph, found)


@pytest.mark.clock
@pytest.mark.parametrize("jobs", [1, 2])
def test_the_time_limit_is_for_all_budgets_together(jobs: int) -> None:
    graph = resnet_like(8)
    began_s = time.monotonic()
    found = sweep_budgets(graph, 8, gap=0.0, time_limit_s=4.0, jobs=jobs)
    assert any(result.status == "time limit" for _, result in found.points)
    assert time.monotonic() - began_s < 10.0
    check_front(graph, found)


def test_the_least_budget_of_a_sweep_has_a_schedule_however_short_the_time() -> None:
    graph = resnet_like(4)
    asked, at_hand = spread_budgets(graph, 3, time_limit_s=AMPLE_S)
    (least,) = at_hand
    assert least.peak_bytes <= least.budget_bytes == asked[0]
    front = sweep_budgets(graph, asked, time_limit_s=0.0, at_hand=at_hand)
    assert [point.result.peak_bytes for point in front.points[:2]] == [least.peak_bytes] * 2
    other = sweep_budgets(graph, asked[:1], "chen_sqrt", at_hand=at_hand)
    assert all(point.result.solver == "chen_sqrt" for point in other.points)


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
def test_a_worker_that_is_killed_costs_no_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graph = chain(8)
    most = peak_bytes_of(graph)
    budgets = [most * part // 10 for part in (6, 8, 10)]
    monkeypatch.setattr(sweep, "solve_within", KilledOnce(os.getpid(), tmp_path / "killed"))
    with pytest.warns(UserWarning, match="a worker of the sweep died: .* The rest is solved here"):
        found = sweep_budgets(graph, budgets, "cut", jobs=2, time_limit_s=AMPLE_S)
    assert [p.result.time_us for p in found.points] == [
        p.result.time_us for p in sweep_budgets(graph, budgets, "cut", time_limit_s=AMPLE_S).points
    ]


def test_no_worker_begins_once_ctrl_c_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_side_by_side", lambda *_: pytest.fail("workers began"))
    with one_job():
        note_interrupt()
        front = sweep_budgets(chain(8), 3, "cut", jobs=2, time_limit_s=AMPLE_S)
    assert len(front) == 3
    assert front.points[0].result.message.startswith("interrupted")


@dataclass(frozen=True)
class KilledOnce:
    """`solve_within`, which in another process than `here` ends it the first time."""

    here: int
    mark: Path

    def __call__(self, *args: Any, **options: Any) -> Any:
        if os.getpid() != self.here and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return solve_within(*args, **options)
