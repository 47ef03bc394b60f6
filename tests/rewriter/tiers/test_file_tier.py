"""Places on the host: two stays that share time share no byte, and little room is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.rewriter.tiers.file_tier import PAGE_BYTES, HostPlaces, host_places
from remat.schedules.schedule import Fetch, Free, Offload, Schedule, Step

STAYS = st.lists(
    st.tuples(st.integers(1, 9 * PAGE_BYTES), st.integers(0, 30), st.integers(1, 15)), max_size=25
)


def planned(stays: list[tuple[int, int, int]]) -> tuple[HostPlaces, list[tuple[int, int, int]]]:
    """Places of stays given as (bytes, start, length); with (step, end step, bytes) of each."""
    values = tuple(Value(f"v{i}", size, "op") for i, (size, *_) in enumerate(stays))
    op = Op("op", "make", "forward", (), tuple(v.name for v in values), 1.0)
    graph = TrainingGraph("stays", (op,), values)
    events: list[tuple[int, int, Step]] = []
    for i, (_, start, length) in enumerate(stays):
        begin: Step = Fetch(f"v{i}", "host") if i % 3 == 0 else Offload(f"v{i}")
        events.append((start, 1, begin))
        if i % 5:
            events.append((start + length, 0, Free(f"v{i}", "host")))
    steps = [step for *_, step in sorted(events, key=lambda event: event[:2])]
    schedule = Schedule.for_graph(graph, steps)
    rows: list[tuple[int, int, int]] = []
    for i, (size, *_) in enumerate(stays):
        mine = [at for at, step in enumerate(steps) if getattr(step, "value", "") == f"v{i}"]
        rows.append((mine[0], mine[1] if len(mine) > 1 else len(steps), size))
    return host_places(graph, schedule), rows


@given(STAYS)
def test_stays_that_share_time_share_no_byte(stays: list[tuple[int, int, int]]) -> None:
    places, rows = planned(stays)
    for start, end, size in rows:
        offset = places.of_step(start)
        assert offset % PAGE_BYTES == 0
        assert offset + size <= places.size_bytes
        for other_start, other_end, other_size in rows:
            if start < other_start < end:
                low = places.of_step(other_start)
                assert low + other_size <= offset or offset + size <= low
            assert other_end > other_start


@given(st.lists(st.integers(1, 9 * PAGE_BYTES), min_size=1, max_size=12))
def test_stays_one_after_the_other_take_the_room_of_the_largest(sizes: list[int]) -> None:
    steps: list[Step] = []
    values = tuple(Value(f"v{i}", size, "op") for i, size in enumerate(sizes))
    op = Op("op", "make", "forward", (), tuple(v.name for v in values), 1.0)
    for value in values:
        steps += [Offload(value.name), Free(value.name, "host")]
    graph = TrainingGraph("stays", (op,), values)
    places = host_places(graph, Schedule.for_graph(graph, steps))
    assert places.size_bytes == -(-max(sizes) // PAGE_BYTES) * PAGE_BYTES


def test_what_has_no_range_has_no_places() -> None:
    assert HostPlaces().of_step(3) == 0
