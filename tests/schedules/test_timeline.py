"""What pictures are drawn from: every figure is the simulator's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.schedules.schedule import Compute, Fetch
from remat.schedules.simulate import simulate
from remat.schedules.timeline import (
    MANY,
    Span,
    layer_of,
    live_bands,
    place_of,
    ribbon,
    rows_of_ops,
    timeline,
)
from remat.solver import solve_within
from tests.links import with_links
from tests.schedules.conftest import Planned
from tests.solver.graphs.random_graphs import chain, training_graphs


@given(training_graphs(max_ops=12), st.sampled_from(["store_all", "chen_sqrt", "dtr"]))
@settings(max_examples=40, deadline=None)
def test_bands_sum_to_what_the_simulator_counts(graph: TrainingGraph, solver: str) -> None:
    schedule = solve_within(graph, 1 << 60, solver).schedule
    assert schedule is not None
    line, found = timeline(graph, schedule), simulate(graph, schedule)
    runs = [i for i, step in enumerate(schedule.steps) if isinstance(step, Compute)]
    assert line.live_bytes.tolist() == [found.live_bytes[i] for i in runs]
    assert line.live_bytes[line.peak_run] == found.peak_bytes
    assert line.edges[-1] == pytest.approx(found.time_us / 1e3 if found.time_us else len(runs))
    for by in ("kind", "module"):
        bands = live_bands(line, by)
        assert sum(bands.values(), np.zeros_like(line.live_bytes)).tolist() == (
            line.live_bytes.tolist()
        )
        assert all((curve >= 0).all() for curve in bands.values())


def test_what_is_offloaded_is_away_until_it_is_fetched() -> None:
    graph = with_links(chain(20))
    budget_bytes = solve_within(graph, 1 << 60, "store_all").peak_bytes // 2
    schedule = solve_within(graph, budget_bytes, "revolve", disk_slots=5).schedule
    assert schedule is not None
    assert any(isinstance(step, Fetch) for step in schedule.steps)
    line = timeline(graph, schedule)
    bands = live_bands(line)
    assert all((curve >= 0).all() for curve in bands.values())
    assert line.live_bytes[line.peak_run] == line.simulation.peak_bytes


def test_the_workspace_band_is_the_workspace_and_second_copies(planned: Planned) -> None:
    line = timeline(planned.graph, planned.schedule)
    band = live_bands(line)["workspace"]
    assert band[line.peak_run] >= line.op_of(line.peak_run).workspace_bytes
    for run in range(len(line)):
        if not line.again[run]:
            assert band[run] == line.op_of(run).workspace_bytes


def test_stays_are_those_of_the_peak(planned: Planned) -> None:
    line = timeline(planned.graph, planned.schedule)
    live = [s.value for s in line.residences if s.begin <= line.peak_run < s.end]
    assert sorted(live) == sorted(line.simulation.held_at_peak)
    counts = planned.schedule.computations()
    assert int(line.again.sum()) == sum(counts.values()) - len(counts)


def test_the_ribbon_has_a_row_a_layer_and_marks_what_runs_again(planned: Planned) -> None:
    line = timeline(planned.graph, planned.schedule)
    picture = ribbon(line)
    assert [t for t in picture.titles if t.startswith("blocks")] == [
        f"blocks.{i}" for i in range(3)
    ]
    again = {run for s in picture.recompute for run in range(s.begin, s.end)}
    assert again == set(np.flatnonzero(line.again).tolist())
    for span in picture.recompute:
        layer = layer_of(line.op_of(span.begin).module)
        assert picture.titles[span.row] == layer
    assert any(s.begin <= s2.begin and s2.end <= s.end for s in picture.holds for s2 in
               picture.holds_most if s.row == s2.row)  # fmt: skip


def test_modules_fold_by_layer_and_by_place() -> None:
    assert layer_of("blocks.3.attn.qkv") == "blocks.3"
    assert layer_of("norm") == "norm"
    assert layer_of("") == "(outside modules)"
    assert place_of("blocks.3.attn.qkv") == "blocks.*.attn"
    assert place_of("layer1.0") == "layer1.*"
    assert place_of("norm") == "norm"


def test_a_graph_without_modules_has_rows_of_ops_few_enough_to_see() -> None:
    ops = [Op(f"f{i}", "t", "forward", (f"f{i - 1}",) if i else (), (f"f{i}",)) for i in range(400)]
    graph = TrainingGraph("G", tuple(ops), tuple(Value(op.name, 8, op.name) for op in ops))
    titles, rows = rows_of_ops(graph)
    assert len(titles) <= MANY
    assert titles[0] == "f0 to f2"
    assert sorted(set(rows)) == list(range(len(titles)))


def test_without_costs_the_axis_counts_runs() -> None:
    ops = [Op(f"f{i}", "t", "forward", (), (f"f{i}",)) for i in range(3)]
    graph = TrainingGraph("G", tuple(ops), tuple(Value(op.name, 8, op.name) for op in ops))
    schedule = solve_within(graph, 1 << 60, "store_all").schedule
    assert schedule is not None
    line = timeline(graph, schedule)
    assert line.edges.tolist() == [0, 1, 2, 3]
    assert line.axis_title == "runs of ops"
    assert ribbon(line).forward[0] == Span(0, 0, 1)
