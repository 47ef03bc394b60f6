"""Chunks are measured only where whole ops do not fit, or where chunks may be faster."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import msgspec
import pytest

from remat.budgets import parse_budget
from remat.graph_capture import trace
from remat.graph_capture.costs import op_costs
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.tracing.traced_step import Trace
from remat.levers.chunks_at_need import may_wait, solved_at_need
from remat.progress import Stopwatch
from remat.schedules.derived import unchunked
from remat.schedules.schedule import ChunkedRegion
from remat.solved import Solved
from remat.solver import Result, solve_within
from tests.graph_capture.chunking.language_models import made
from tests.models import make
from tests.solver.graphs.region_graph import MIB, region_graph


class Measured:
    """Counts how often chunks are measured; `cost_us` is what each of them takes more."""

    def __init__(self, cost_us: float) -> None:
        self.graph, self.times = region_graph(cost_us), 0

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        assert not graph.regions
        self.times += 1
        return self.graph


def solved(
    budget_bytes: int, measured: Measured, monkeypatch: pytest.MonkeyPatch, overhead: float = 0.0
) -> Solved:
    """Solve at a budget; whole ops are said to take this much longer than they do."""
    monkeypatch.setattr(op_costs, "with_optimistic_chunks", lambda *_: region_graph(0.0))

    def solve_for(graph: TrainingGraph, /, *, at_hand: Result | None = None) -> Result:
        found = solve_within(graph, budget_bytes, at_hand=at_hand)
        if graph.regions or found.schedule is None:
            return found
        return msgspec.structs.replace(
            found, time_us=(1 + overhead) * found.time_us, overhead=overhead
        )

    return solved_at_need(
        cast("Trace", None), unchunked(measured.graph), solve_for, measured, Stopwatch()
    )


def test_a_plan_of_whole_ops_that_costs_nothing_needs_no_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = Measured(5.0)
    found = solved(250 * MIB, measured, monkeypatch)
    assert found.result.schedule is not None
    assert measured.times == 0
    assert not found.graph.regions


def test_where_nothing_fits_whole_chunks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(5.0)
    found = solved(40 * MIB, measured, monkeypatch)
    assert found.result.schedule is not None
    assert found.result.schedule.chunks == (ChunkedRegion("head", 4),)
    assert measured.times == 1
    assert found.graph is measured.graph


@pytest.mark.parametrize(("overhead", "times"), [(0.005, 0), (0.5, 1)])
def test_chunks_that_may_be_faster_by_more_than_the_gap_are_measured(
    monkeypatch: pytest.MonkeyPatch, overhead: float, times: int
) -> None:
    measured = Measured(0.0)
    found = solved(250 * MIB, measured, monkeypatch, overhead)
    assert measured.times == times
    assert found.result.schedule is not None


def test_chunks_that_were_asked_for_by_name_do_not_wait() -> None:
    model, args, *_ = make("plain")
    traced = trace(model, args, split=None)
    budget = parse_budget("60%")
    assert may_wait(traced, budget)
    assert not may_wait(traced, parse_budget("min"))
    for changed in ({"split": "exact"}, {"split": "tolerance"}, {"split": "none"}):
        other: Any = dataclasses.replace(traced.recipe, **changed)
        assert not may_wait(dataclasses.replace(traced, recipe=other), budget)


def test_hoped_chunks_take_no_longer_than_measured_ones() -> None:
    traced = trace(*made("plain"), split="exact")
    graph = op_costs.measure_costs(traced, chunks=False)
    assert graph.regions == ()
    measured, hoped = (
        op_costs.with_measured_chunks(traced, graph),
        op_costs.with_optimistic_chunks(traced, graph),
    )
    times = [
        {one.chunks: sum(op.cost_us for _, op in one.ops) for one in region.choices}
        for region in (*measured.regions, *hoped.regions)
    ]
    assert times[0]
    assert all(times[1][chunks] <= us for chunks, us in times[0].items())
