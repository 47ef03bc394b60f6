"""Layouts of random buffers and of plans: judged, aligned, the same twice, and near the load."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph_capture.errors import LayoutError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.layout import Buffers, buffers_of, check_layout
from remat.solver import solve_within
from remat.solver.layout import placing
from remat.solver.layout.placing import place_buffers
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.solver.graphs.random_graphs import branches, chain, gpt_like, resnet_like, unet_like
from tests.solver.layout.random_boxes import cut_rectangle, recomputing_net, some_buffers


@settings(max_examples=60, deadline=None)
@given(some_buffers(), st.sampled_from([1, 64, 512]))
def test_random_buffers_lie_apart_and_aligned(buffers: Buffers, alignment_bytes: int) -> None:
    layout = place_buffers(buffers, alignment_bytes=alignment_bytes)
    check_layout(buffers, layout)
    assert all(offset % alignment_bytes == 0 for offset in layout.offsets_bytes)
    assert layout.arena_bytes <= sum(
        -(-size // alignment_bytes) * alignment_bytes for size in buffers.size_bytes.tolist()
    )


@pytest.mark.parametrize("part", [1.0, 0.7, 0.5, 0.35])
@pytest.mark.parametrize(
    "graph", [chain(12), gpt_like(3), unet_like(3), resnet_like(6), branches(4)],
    ids=lambda graph: graph.name,
)  # fmt: skip
def test_plans_lie_within_a_thousandth_of_their_load(graph: TrainingGraph, part: float) -> None:
    budget_bytes = int(part * peak_bytes_of(graph))
    result = solve_within(graph, budget_bytes, "hierarchical", time_limit_s=AMPLE_S)
    schedule = result.schedule or result.least_schedule
    assert schedule is not None
    layout = place_buffers(buffers_of(graph, schedule), alignment_bytes=1)
    assert layout.gap <= 0.001


def test_the_same_buffers_get_the_same_layout() -> None:
    buffers = cut_rectangle(0, 30)
    assert place_buffers(buffers, alignment_bytes=1) == place_buffers(buffers, alignment_bytes=1)


def test_where_greedy_placements_miss_ejections_find_the_load() -> None:
    layout = place_buffers(cut_rectangle(0, 30), alignment_bytes=1)
    assert (layout.placed_by, layout.gap) == ("guided ejection, length", 0)


def test_where_ejections_miss_a_dive_finds_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "STEPS", 0)
    layout = place_buffers(cut_rectangle(0, 30), alignment_bytes=1)
    assert (layout.placed_by, layout.gap) == ("canonical search, WAT", 0)


@pytest.mark.parametrize("limit", ["MOST_OVERLAPS", "DIVE_WORK"])
def test_of_too_many_boxes_there_are_no_dives(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(placing, "STEPS", 0)
    monkeypatch.setattr(placing, limit, 29)
    assert place_buffers(cut_rectangle(0, 30), alignment_bytes=1).gap > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("unit", [1 << 20, 300_000])
def test_deep_nets_that_compute_again_lie_near_their_load(seed: int, unit: int) -> None:
    buffers = recomputing_net(seed, layers=24, slots=3, unit_bytes=unit)
    layout = place_buffers(buffers)
    assert layout.gap <= 0.001
    assert layout == place_buffers(buffers)


def test_many_buffers_of_a_deep_net_lie_near_their_load() -> None:
    buffers = recomputing_net(5, layers=90, slots=4, unit_bytes=1 << 20)
    assert len(buffers) > 3000
    assert place_buffers(buffers).gap <= 0.001


def test_small_buffers_that_end_too_high_are_ejected_into_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All are small, and no greedy placement of them is low enough."""
    monkeypatch.setattr(placing, "SMALL_PART", 1)
    layout = place_buffers(cut_rectangle(6, 25), alignment_bytes=1)
    assert layout.placed_by == "first fit, size, ejection"
    assert layout.gap <= 1 / placing.SLACK_PART


def test_small_buffers_fill_holes() -> None:
    """Two large ones with a hole beside them, in which the small ones fit."""
    buffers = Buffers.of_arrays([1 << 20, 1 << 19, 64, 64], [0, 2, 2, 3], [2, 4, 4, 4])
    assert place_buffers(buffers, alignment_bytes=64).gap == 0


def test_workspace_that_is_not_aligned_takes_its_own_bytes_at_the_top() -> None:
    buffers = Buffers.of_arrays([512, 100], [0, 0], [1, 1])
    assert place_buffers(buffers).arena_bytes == 612


@pytest.mark.parametrize("alignment_bytes", [0, -512, 768])
def test_an_alignment_that_cannot_be_is_refused(alignment_bytes: int) -> None:
    with pytest.raises(LayoutError, match="give a power of two"):
        place_buffers(Buffers.of_arrays([1], [0], [1]), alignment_bytes=alignment_bytes)
