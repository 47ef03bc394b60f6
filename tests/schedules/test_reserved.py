"""Reserved bytes of schedules: bounds that always hold, and fragmentation made by hand."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from remat.formats import MIB
from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import Op, Resident, TrainingGraph, Value
from remat.schedules.caching_allocator import AllocatorSettings
from remat.schedules.layout import Buffers, buffers_of
from remat.schedules.reserved import (
    DEFAULT,
    EXPANDABLE,
    allocator_peak,
    reserved_of,
    retries_within,
)
from remat.schedules.schedule import Compute, Free, Schedule
from remat.schedules.simulate import simulate
from tests.schedules.conftest import Planned
from tests.schedules.random_walks import random_steps
from tests.solver.graphs.random_graphs import training_graphs


@settings(max_examples=60, deadline=None)
@given(training_graphs(max_ops=8), st.integers(0, 1 << 30))
def test_the_peak_is_allocated_and_what_is_allocated_is_reserved(
    graph: TrainingGraph, seed: int
) -> None:
    source = random.Random(seed)
    values = tuple(
        msgspec.structs.replace(v, size_bytes=source.randint(1, 40 * MIB) if v.producer else 0)
        for v in graph.values
    )
    resident = Resident(parameters_bytes=source.randint(0, 9))
    graph = msgspec.structs.replace(graph, values=values, resident=resident)
    schedule = Schedule.for_graph(graph, random_steps(graph, seed))
    try:
        peak_bytes = simulate(graph, schedule).peak_bytes
    except ScheduleError:
        reject()
    said = reserved_of(graph, schedule)
    for taken in (said.default, said.expandable):
        assert peak_bytes <= taken.allocated_bytes <= taken.reserved_bytes


def two_ops() -> TrainingGraph:
    """`a` makes 30 MiB, `b` reads them and makes 50 bytes; 7 are resident."""
    return TrainingGraph(
        name="two",
        ops=(
            Op("a", "made", "forward", ("i",), ("x",), 1.0),
            Op("b", "made", "forward", ("x",), ("z",), 1.0, workspace_bytes=31 * MIB),
        ),
        values=(
            Value("i", 7, kind="input"),
            Value("x", 30 * MIB, "a"),
            Value("z", 50, "b"),
        ),
        outputs=("z",),
        resident=Resident(batch_bytes=7),
    )


def test_outputs_and_workspaces_are_requests_beside_what_is_resident() -> None:
    graph = two_ops()
    schedule = Schedule.for_graph(graph, [Compute("a"), Compute("b"), Free("x")])
    said = reserved_of(graph, schedule)
    # 31 MiB take a whole segment of 32, since what is left of it is too little to be split off.
    # `z` has a segment of the small pool, and a block of 512 bytes of it.
    assert said.default.allocated_bytes == (30 + 32) * MIB + 512 + 7
    assert said.expandable.allocated_bytes == (30 + 31) * MIB + 512 + 7
    assert said.default.reserved_bytes == (30 + 32 + 2) * MIB + 7
    assert said.expandable.reserved_bytes == (80 + 2) * MIB + 7


def test_a_later_step_reserves_more() -> None:
    """From the second on, two of 12 MiB cut up the free 24 MiB before the 16 MiB come."""
    buffers = Buffers.of_arrays(
        [24 * MIB, 12 * MIB, 12 * MIB, 16 * MIB], [0, 1, 1, 1], [1, 2, 2, 2]
    )
    taken = [allocator_peak(buffers, DEFAULT, n_steps=n).reserved_bytes // MIB for n in (1, 2, 3)]
    assert taken == [40, 56, 56]


def test_recomputation_in_another_order_fragments_what_expandable_segments_join() -> None:
    """Four of 15 MiB die, and three of 20 MiB come: fixed segments are too small for them."""
    n = 4
    buffers = Buffers.of_arrays(
        [15 * MIB] * n + [20 * MIB] * 3, [0] * n + [1] * 3, [1] * n + [2] * 3
    )
    assert buffers.load_bytes == 60 * MIB
    assert allocator_peak(buffers, DEFAULT).reserved_bytes == (16 * n + 60) * MIB
    assert allocator_peak(buffers, EXPANDABLE).reserved_bytes == 60 * MIB


def test_a_tight_device_gives_back_what_is_free_and_a_smaller_one_runs_out() -> None:
    n = 4
    buffers = Buffers.of_arrays(
        [15 * MIB] * n + [20 * MIB] * 3, [0] * n + [1] * 3, [1] * n + [2] * 3
    )
    resident = dataclasses.replace(buffers, resident_bytes=5 * MIB)
    assert retries_within(resident, DEFAULT, (16 * n + 60 + 5) * MIB) == 0
    # The first step gives its four segments back. In the second, 15 MiB cut up each of the three
    # that came for them, and the last 15 MiB need a fourth.
    assert retries_within(resident, DEFAULT, (60 + 16 + 5) * MIB) == 1
    assert retries_within(resident, DEFAULT, (60 + 15 + 5) * MIB) is None
    assert retries_within(resident, EXPANDABLE, (60 + 5) * MIB) == 0
    assert retries_within(resident, EXPANDABLE, (60 + 4) * MIB) is None


def test_other_settings_can_be_asked_for() -> None:
    buffers = Buffers.of_arrays([5 * MIB], [0], [1])
    large = AllocatorSettings(large_segment_bytes=64 * MIB)
    assert allocator_peak(buffers, large).reserved_bytes == 64 * MIB
    assert allocator_peak(buffers, large).allocated_bytes == 5 * MIB


def test_a_plan_of_a_model_reserves_in_both_settings(planned: Planned) -> None:
    said = reserved_of(planned.graph, planned.schedule)
    buffers = buffers_of(planned.graph, planned.schedule)
    assert said.default == allocator_peak(buffers, DEFAULT)
    assert said.expandable == allocator_peak(buffers, EXPANDABLE)


def test_a_schedule_of_another_graph_is_refused() -> None:
    other = Schedule(steps=(), graph_hash="")
    with pytest.raises(ScheduleError, match="this plan was made for another graph"):
        reserved_of(two_ops(), other)
