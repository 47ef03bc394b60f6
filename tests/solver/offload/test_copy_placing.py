"""Placing copies: within budgets on every tier, and at the times that closed forms give."""

from __future__ import annotations

import functools
import itertools

import pytest

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import Link, Links, Op, TrainingGraph, Value
from remat.schedules.schedule import Compute, Fetch, Free, Offload
from remat.schedules.simulate import simulate
from remat.solver.offload.copy_placing import in_flight_bytes, place_copies, untimed_clock
from remat.solver.offload.fetch_as_recompute import UntimedSchedule
from tests.solver.offload.hosted_cases import (
    HostedCase,
    hosted_base,
    many_cases,
    with_host_bytes,
)

UNIT_BYTES = 1000
FAST = Links(Link(1e9), Link(1e9), 1 << 40)


@functools.cache
def cases() -> list[HostedCase]:
    return many_cases(150)


def there_and_back(length: int, cost_us: float = 10.0) -> TrainingGraph:
    """x0 .. xn, then yn .. y0; y_i reads x_i and y_(i+1). All values have the same size."""
    forward = [
        Op(f"x{i}", "t", "forward", (f"x{i - 1}",) if i else (), (f"x{i}",), cost_us)
        for i in range(length)
    ]
    backward = [
        Op(f"y{i}", "t", "backward", (f"x{i}", *((f"y{i + 1}",) if i + 1 < length else ())),
           (f"y{i}",), cost_us)
        for i in reversed(range(length))
    ]  # fmt: skip
    ops = (*forward, *backward)
    values = tuple(Value(op.name, UNIT_BYTES, op.name) for op in ops)
    return TrainingGraph("there and back", ops, values, outputs=("y0",))


def hosted_all(graph: TrainingGraph, links: Links, budget_bytes: int) -> UntimedSchedule:
    """The base in which all of forward but its end may wait on the host."""
    base = hosted_base(graph, links, set(range(graph.n_forward - 1)), budget_bytes)
    assert base is not None
    return base


def test_no_budget_is_ever_exceeded() -> None:
    stalled = with_copies = 0
    for case in cases():
        for budget_bytes in {case.base.peak_bytes, case.budget_bytes, case.budget_bytes + 9}:
            placed = place_copies(case.graph, case.base, budget_bytes, case.links)
            assert placed is not None
            assert placed.found == simulate(case.graph, placed.schedule)
            assert case.base.peak_bytes <= placed.found.peak_bytes <= budget_bytes
            assert placed.found.time_us >= untimed_clock(case.graph, case.base)[-1]
            stalled += bool(placed.found.stalls)
            with_copies += placed.schedule.moves
    assert min(stalled, with_copies) > 50


def test_a_base_over_the_budget_is_not_placed() -> None:
    for case in cases()[:20]:
        low_bytes = case.base.peak_bytes - 1
        assert place_copies(case.graph, case.base, low_bytes, case.links) is None


def test_with_room_for_all_that_is_in_flight_nothing_waits_but_for_the_first_fetch() -> None:
    """In-flight bytes are what a schedule without stalls wants beside the base."""
    for case in cases():
        flight = in_flight_bytes(case.graph, case.base, case.links)
        assert (flight >= 0).all()
        wide_bytes = int((case.base.live_bytes + flight).max())
        placed = place_copies(case.graph, case.base, wide_bytes, case.links)
        fast = place_copies(case.graph, case.base, wide_bytes, FAST)
        assert placed is not None
        assert fast is not None
        assert fast.found.time_us <= untimed_clock(case.graph, case.base)[-1] + 1e-3
        assert placed.found.peak_bytes <= wide_bytes


def test_room_on_the_host_is_kept_to() -> None:
    refused = 0
    for case in cases():
        placed = place_copies(case.graph, case.base, case.budget_bytes, case.links)
        assert placed is not None
        need_bytes = placed.found.host_peak_bytes
        enough = with_host_bytes(case.links, need_bytes)
        same = place_copies(case.graph, case.base, case.budget_bytes, enough)
        assert same is not None
        assert same.found.host_peak_bytes <= need_bytes
        if need_bytes:
            less = with_host_bytes(case.links, 0)
            refused += place_copies(case.graph, case.base, case.budget_bytes, less) is None
    assert refused > 20


def test_values_wait_on_nvme_where_they_are_told_to() -> None:
    spilled_bytes = 0
    for case in cases():
        names = frozenset(itertools.islice(case.base.made, 0, None, 2))
        placed = place_copies(case.graph, case.base, case.budget_bytes, case.links, spilled=names)
        assert placed is not None
        found = simulate(case.graph, placed.schedule)
        assert found.peak_bytes <= case.budget_bytes
        down = [step for step in placed.schedule.steps if isinstance(step, Offload)]
        written = {step.value for step in down if step.to == "nvme"}
        assert written <= names
        assert found.moved_bytes["write"] == found.moved_bytes["read"]
        spilled_bytes += found.nvme_peak_bytes
    assert spilled_bytes > 100


def test_nvme_takes_what_the_host_has_no_room_for() -> None:
    graph = there_and_back(8)
    link = Link(1000.0)
    links = Links(link, link, 2 * UNIT_BYTES, link, link, 8 * UNIT_BYTES)
    base = hosted_all(graph, links, 4 * UNIT_BYTES)
    assert place_copies(graph, base, 4 * UNIT_BYTES, links) is None
    spilled = sorted(base.made)[:-1]
    placed = place_copies(graph, base, 4 * UNIT_BYTES, links, spilled=spilled)
    assert placed is not None
    assert placed.found.host_peak_bytes <= 2 * UNIT_BYTES
    assert placed.found.nvme_peak_bytes > 0


def test_without_nvme_nothing_can_be_told_to_wait_there() -> None:
    graph = there_and_back(6)
    base = hosted_all(graph, FAST, 4 * UNIT_BYTES)
    with pytest.raises(SolverError, match=r"capture with nvme=.*no link to NVMe"):
        place_copies(graph, base, 4 * UNIT_BYTES, FAST, spilled=base.made)


@pytest.mark.parametrize("copy_us", [1.0, 5.0, 10.0])
def test_copies_no_longer_than_their_ops_hide(copy_us: float) -> None:
    """One op computes while one value is copied, each way: room for what is in flight will do."""
    graph = there_and_back(12)
    links = Links(Link(UNIT_BYTES / copy_us), Link(UNIT_BYTES / copy_us), 1 << 40)
    base = hosted_all(graph, links, 4 * UNIT_BYTES)
    placed = place_copies(graph, base, 5 * UNIT_BYTES, links)
    assert placed is not None
    assert placed.found.time_us == graph.time_us
    assert not placed.found.stalls
    assert placed.found.moved_bytes["d2h"] >= 6 * UNIT_BYTES


def test_a_slow_link_is_waited_for_as_long_as_it_is_busy() -> None:
    """The device is done with its last op one op after the last value is back."""
    graph = there_and_back(12)
    links = Links(Link(UNIT_BYTES / 100), Link(UNIT_BYTES / 100), 1 << 40)
    base = hosted_all(graph, links, 4 * UNIT_BYTES)
    placed = place_copies(graph, base, 4 * UNIT_BYTES, links)
    assert placed is not None
    busy_us = placed.found.busy_us
    assert busy_us["d2h"] + busy_us["h2d"] <= placed.found.time_us
    assert placed.found.time_us <= busy_us["d2h"] + busy_us["h2d"] + graph.time_us
    assert placed.found.peak_bytes == 4 * UNIT_BYTES


def test_offloads_begin_when_made_and_the_host_lets_go_after_the_last_fetch() -> None:
    for case in cases():
        placed = place_copies(case.graph, case.base, case.budget_bytes, case.links)
        assert placed is not None
        steps = placed.schedule.steps
        for i, step in enumerate(steps):
            if isinstance(step, Offload):
                before = next(s for s in reversed(steps[:i]) if not isinstance(s, Offload))
                assert isinstance(before, Compute)
                made = case.graph.ops[case.graph.op_index[before.op]].outputs
                assert step.value in made
            if isinstance(step, Free) and step.at == "host":
                assert steps[i - 1] == Fetch(step.value)


def test_what_has_room_all_the_way_stays() -> None:
    graph = there_and_back(6)
    base = hosted_all(graph, FAST, 4 * UNIT_BYTES)
    slow = Links(Link(0.01), Link(0.01), 1 << 40)
    placed = place_copies(graph, base, 100 * UNIT_BYTES, slow)
    assert placed is not None
    assert not placed.schedule.moves
    assert placed.found.time_us == graph.time_us
