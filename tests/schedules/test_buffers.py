"""Buffers against the simulator: the same peak of any schedule, and each rule by hand."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from remat.graph_capture.errors import LayoutError, ScheduleError
from remat.graph_capture.graph import Op, Resident, TrainingGraph, Value
from remat.schedules.layout import BufferKind, Buffers, buffers_of
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.links import with_links
from tests.schedules.conftest import Planned
from tests.schedules.random_walks import random_steps, with_transfers
from tests.solver.graphs.random_graphs import (
    branches,
    chain,
    gpt_like,
    resnet_like,
    training_graphs,
    unet_like,
)

GRAPHS = [chain(12), gpt_like(2), unet_like(3), resnet_like(4), branches(4)]
PLANNERS = ("store_all", "full", "chen_sqrt", "revolve", "hierarchical", "dtr", "msps")


def agrees(graph: TrainingGraph, schedule: Schedule) -> Buffers:
    """Buffers of `schedule`, whose curve is the simulator's at each run and at each fetch."""
    found, buffers = simulate(graph, schedule), buffers_of(graph, schedule)
    resident_bytes = graph.resident.total_bytes
    brings = [isinstance(step, Compute | Fetch) for step in schedule.steps]
    curve = [now for now, brought in zip(found.live_bytes, brings, strict=True) if brought]
    assert (buffers.live_bytes + resident_bytes).tolist() == curve
    assert buffers.load_bytes + resident_bytes == found.peak_bytes
    return buffers


@settings(max_examples=150, deadline=None)
@given(training_graphs(max_ops=8), st.integers(0, 1 << 30), st.booleans())
def test_most_live_bytes_and_resident_are_the_judges_peak(
    graph: TrainingGraph, seed: int, transfers: bool
) -> None:
    source = random.Random(seed)
    ops = tuple(
        msgspec.structs.replace(op, workspace_bytes=source.randint(0, 9)) for op in graph.ops
    )
    graph = msgspec.structs.replace(graph, ops=ops)
    steps = random_steps(graph, seed)
    if transfers:
        steps = with_transfers(graph, steps, seed)
    schedule = Schedule.for_graph(graph, steps)
    try:
        simulate(graph, schedule)
    except ScheduleError:
        reject()
    agrees(graph, schedule)


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_plans_of_solvers_agree(graph: TrainingGraph) -> None:
    peak_bytes = peak_bytes_of(graph)
    for solver in PLANNERS:
        result = solve_within(graph, int(0.7 * peak_bytes), solver, time_limit_s=AMPLE_S)
        schedule = result.schedule or result.least_schedule
        if schedule is not None:
            agrees(graph, schedule)


def test_a_traced_plan_that_computes_again_agrees(planned: Planned) -> None:
    buffers = agrees(planned.graph, planned.schedule)
    made = {value.name for value in planned.graph.values if value.producer}
    values = [
        name
        for name, kind in zip(buffers.names, buffers.kind, strict=True)
        if kind in (BufferKind.VALUE, BufferKind.LASTING)
    ]
    assert set(values) <= made
    assert len(values) > len(set(values)), "what is computed again is a buffer again"


def two_outputs() -> TrainingGraph:
    """`a` makes `x` and `y`, `b` reads both; the step returns `z`."""
    return TrainingGraph(
        name="two",
        ops=(
            Op("a", "made", "forward", ("i",), ("x", "y"), 1.0),
            Op("b", "made", "forward", ("x", "y"), ("z", "none"), 1.0, workspace_bytes=5),
        ),
        values=(
            Value("i", 7, kind="input"),
            Value("x", 10, "a"),
            Value("y", 20, "a"),
            Value("z", 40, "b"),
            Value("none", 0, "b"),
        ),
        outputs=("z",),
        resident=Resident(batch_bytes=7),
    )


def rows(buffers: Buffers) -> list[tuple[str, int, int, int, BufferKind]]:
    columns = (buffers.size_bytes, buffers.start, buffers.end, buffers.kind)
    return [
        (name, int(size_bytes), int(start), int(end), BufferKind(kind))
        for name, size_bytes, start, end, kind in zip(buffers.names, *columns, strict=True)
    ]


def test_a_second_copy_counts_while_its_op_runs() -> None:
    steps = [Compute("a"), Free("x"), Compute("a"), Compute("b"), Free("x"), Free("y")]
    graph = two_outputs()
    buffers = agrees(graph, Schedule.for_graph(graph, steps))
    assert rows(buffers) == [
        ("x", 10, 0, 1, BufferKind.VALUE),
        ("y", 20, 0, 3, BufferKind.VALUE),
        ("x", 10, 1, 3, BufferKind.VALUE),
        ("y", 20, 1, 2, BufferKind.COPY),
        ("z", 40, 2, 3, BufferKind.LASTING),
        ("b", 5, 2, 3, BufferKind.WORKSPACE),
    ]
    assert (buffers.n_times, buffers.forward_end, buffers.resident_bytes) == (3, 3, 7)


def test_an_offloaded_value_is_a_buffer_on_each_side() -> None:
    moved = [Offload("x"), Free("x"), Fetch("x"), Free("x", "host")]
    steps = [Compute("a"), *moved, Compute("b"), Free("x"), Free("y")]
    graph = with_links(two_outputs())
    buffers = agrees(graph, Schedule.for_graph(graph, steps))
    assert rows(buffers)[:3] == [
        ("x", 10, 0, 1, BufferKind.VALUE),
        ("y", 20, 0, 3, BufferKind.VALUE),
        ("x", 10, 1, 3, BufferKind.VALUE),
    ]


def test_an_invalid_schedule_has_no_buffers() -> None:
    graph = two_outputs()
    with pytest.raises(ScheduleError, match="op b reads x, which is not live"):
        buffers_of(graph, Schedule.for_graph(graph, [Compute("b")]))


def test_a_graph_without_ops_has_no_buffers() -> None:
    graph = TrainingGraph(name="empty", ops=(), values=())
    buffers = agrees(graph, Schedule.for_graph(graph, []))
    assert (len(buffers), buffers.load_bytes) == (0, 0)


def test_the_hash_is_of_sizes_and_times() -> None:
    one = Buffers.of_arrays([1, 2], [0, 1], [2, 3])
    assert one.hash == Buffers.of_arrays(np.array([1, 2]), [0, 1], [2, 3]).hash
    assert one.hash != Buffers.of_arrays([1, 2], [0, 1], [2, 4]).hash


@pytest.mark.parametrize(
    ("size_bytes", "start", "end", "message"),
    [
        ([0], [0], [1], "leave out buffers of 0 bytes or less"),
        ([1], [1], [1], "a buffer ends before it starts"),
        ([1], [-1], [1], "starts before time 0"),
        ([1, 2], [0], [1], "give each buffer one size, start, end, kind and name"),
        ([1 << 62], [0], [1], "together are too large"),
    ],
)
def test_buffers_that_cannot_be_are_refused(
    size_bytes: list[int], start: list[int], end: list[int], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        Buffers.of_arrays(size_bytes, start, end)
