"""Layouts of random buffers and of plans: judged, aligned, the same twice, and near the load."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph_capture.errors import LayoutError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.buffers import Buffers, buffers_of
from remat.schedules.layout import check_layout
from remat.solver import solve
from remat.solver.layout import placing
from remat.solver.layout.placing import place
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.solver.layout.random_boxes import cut_rectangle, some_buffers
from tests.solver.random_graphs import branches, chain, gpt_like, resnet_like, unet_like


@settings(max_examples=60, deadline=None)
@given(some_buffers(), st.sampled_from([1, 64, 512]))
def test_random_buffers_lie_apart_and_aligned(buffers: Buffers, alignment_bytes: int) -> None:
    layout = place(buffers, alignment_bytes=alignment_bytes)
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
    result = solve(graph, budget_bytes, "hierarchical", time_limit_s=AMPLE_S)
    schedule = result.schedule or result.least_schedule
    assert schedule is not None
    layout = place(buffers_of(graph, schedule), alignment_bytes=1)
    assert layout.gap <= 0.001


def test_the_same_buffers_get_the_same_layout() -> None:
    buffers = cut_rectangle(0, 30)
    assert place(buffers, alignment_bytes=1) == place(buffers, alignment_bytes=1)


def test_where_greedy_placements_miss_a_search_finds_the_load() -> None:
    layout = place(cut_rectangle(0, 30), alignment_bytes=1)
    assert (layout.placed_by, layout.gap) == ("canonical search, WAT", 0)


def test_without_lists_of_overlaps_the_squeaky_wheel_finds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placing, "MOST_OVERLAPS", 29)
    layout = place(cut_rectangle(0, 30), alignment_bytes=1)
    assert (layout.placed_by, layout.gap) == ("squeaky wheel", 0)


def test_small_buffers_fill_holes() -> None:
    """Two large ones with a hole beside them, in which the small ones fit."""
    buffers = Buffers.of_arrays([1 << 20, 1 << 19, 64, 64], [0, 2, 2, 3], [2, 4, 4, 4])
    assert place(buffers, alignment_bytes=64).gap == 0


def test_workspace_that_is_not_aligned_takes_its_own_bytes_at_the_top() -> None:
    buffers = Buffers.of_arrays([512, 100], [0, 0], [1, 1])
    assert place(buffers).arena_bytes == 612


@pytest.mark.parametrize("alignment_bytes", [0, -512, 768])
def test_an_alignment_that_cannot_be_is_refused(alignment_bytes: int) -> None:
    with pytest.raises(LayoutError, match="take a power of two"):
        place(Buffers.of_arrays([1], [0], [1]), alignment_bytes=alignment_bytes)
