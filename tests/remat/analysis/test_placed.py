"""Layouts of plans: the alignment of the device, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import remat
from remat.analysis.plan_figures import arena_text, place
from remat.graph_capture.errors import LayoutError, ScheduleError
from remat.schedules.layout import Layout
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from tests.graphs import peak_bytes_of
from tests.solver.graphs.random_graphs import chain, gpt_like

GRAPH = gpt_like(2)


def plan() -> Schedule:
    result = remat.solve(GRAPH, int(0.8 * peak_bytes_of(GRAPH)), "hierarchical")
    assert result.schedule is not None
    return result.schedule


@pytest.mark.parametrize(("device", "alignment_bytes"), [("cpu", 64), ("h100", 512)])
def test_offsets_are_aligned_as_torch_aligns_on_the_device(
    device: str, alignment_bytes: int
) -> None:
    layout = place(msgspec.structs.replace(GRAPH, device=device), plan())
    assert layout.alignment_bytes == alignment_bytes
    assert layout.arena_bytes + GRAPH.resident.total_bytes >= simulate(GRAPH, plan()).peak_bytes


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(ScheduleError, match="made for another graph"):
        place(chain(3), plan())
    with pytest.raises(LayoutError, match=r"give a power of two as alignment.* not 0"):
        place(GRAPH, plan(), alignment_bytes=0)


def test_the_arena_in_words() -> None:
    layout = Layout((0,), 3 << 20, 2 << 20, 64, "hash")
    assert arena_text(layout) == "3.00 MiB, 50.0 % above the most live bytes"


@pytest.mark.parametrize(
    ("graph", "schedule", "message"),
    [
        (1, 2, "a schedule goes with a graph, and this is int"),
        (GRAPH, 2, "pass result.schedule .*this is int"),
        (GRAPH, None, "this is NoneType"),
        (GRAPH, remat.solve(GRAPH, 1, "hierarchical"), "this is Plan"),
    ],
)
def test_what_is_no_graph_or_no_schedule_is_named(graph: Any, schedule: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        place(graph, schedule)
    with pytest.raises(LayoutError, match=r"give a power of two as alignment.* not '64'"):
        place(GRAPH, plan(), alignment_bytes="64")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("power", [55, 62, 64])
def test_an_alignment_that_no_offsets_can_keep_is_refused_with_the_largest_that_they_can(
    power: int,
) -> None:
    with pytest.raises(LayoutError, match=r"no offsets of \d+ buffers stay below") as found:
        place(GRAPH, plan(), alignment_bytes=1 << power)
    most_bytes = int(str(found.value).split("at most ")[1].split(",")[0])
    layout = place(GRAPH, plan(), alignment_bytes=most_bytes)
    assert all(offset % most_bytes == 0 for offset in layout.offsets_bytes)
    with pytest.raises(LayoutError, match="no offsets"):
        place(GRAPH, plan(), alignment_bytes=2 * most_bytes)
