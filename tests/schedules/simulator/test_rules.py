"""Each rule on copies and tiers has one error, which says where and what."""

from __future__ import annotations

import msgspec
import pytest

from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import Link, Links, Op, TrainingGraph, Value
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.schedules.simulate import Simulation, simulate
from tests.links import links

SIZE_BYTES = 1000
A, B, C = Compute("a"), Compute("b"), Compute("c")
ONE_WAY = Links(Link(1.0), Link(1.0), 1 << 30)
"""No NVMe; a copy takes 1000 us."""


def graph(found: Links | None = ONE_WAY, **of_w: str) -> TrainingGraph:
    """a reads the parameter w, b reads a, c reads both; the host can run b alone."""
    ops = (
        Op("a", "t", "forward", ("w",), ("a",), 10.0),
        Op("b", "t", "backward", ("a",), ("b",), 10.0, host_cost_us=40.0),
        Op("c", "t", "backward", ("a", "b"), ("c",), 10.0),
    )
    made = (Value(op.name, SIZE_BYTES, op.name) for op in ops)
    given = Value("w", SIZE_BYTES, kind="parameter", **of_w)
    return TrainingGraph("rules", ops, (given, *made), outputs=("c",), links=found)


def judged(one: TrainingGraph, *steps: Step) -> Simulation:
    return simulate(one, Schedule.for_graph(one, steps))


def roomy(**rooms: int) -> Links:
    return msgspec.structs.replace(links(), **rooms)


@pytest.mark.parametrize(
    ("one", "steps", "text"),
    [
        (graph(None), (A, Offload("a")), "a goes from device to host, and the graph has no such "
         r"link: capture with host= \(and nvme=\), or solve without"),
        (graph(), (A, Offload("a"), Offload("a", "nvme")), "a goes from host to nvme, and the "),
        (graph(), (A, Offload("a", "device")), "a goes from nvme to device, and the graph has no"),
        (graph(), (A, Fetch("a", "nvme")), "a goes from device to nvme, and the graph has no"),
        (graph(roomy(host_bytes=999)), (A, Offload("a")), "the host is full: a exceeds it by 1"),
        (graph(roomy(nvme_bytes=0)), (A, Offload("a"), Offload("a", "nvme")),
         "the nvme is full: a exceeds it by 1000 bytes"),
        (graph(roomy(host_bytes=1999)), (A, Offload("a"), Compute("b", "host")),
         "the host is full: b exceeds it by 1 byte$"),
        (graph(roomy(host_bytes=999), home="host"), (A,), "the host is full: w exceeds it by 1"),
        (graph(), (A, Fetch("a")), "a is not on the host.*: no copy"),
        (graph(), (A, Free("a"), Offload("a")), "a is not on the device.*: no copy"),
        (graph(), (Offload("w"),), "w is not on the device.*: no copy"),
        (graph(), (A, Offload("a"), Offload("a")), "a is .*already on the host"),
        (graph(), (A, Free("a", "host")), "a is not live on the host, so it cannot be dropped"),
        (graph(), (A, Offload("a"), Compute("c", "host")), "op c cannot run on the host"),
        (graph(), (A, Compute("b", "nvme")), "op b cannot run on the nvme"),
        (graph(), (A, Compute("b", "host")), "op b reads a, which is not live on the host"),
        (graph(), (A, Offload("a"), Free("a"), B), "op b reads a, which is not live"),
        (graph(home="host"), (A,), "op a reads w, which is not live"),
        (graph(home="host"), (Fetch("w"), Free("w", "host"), A, B, C),
         "w must be on the host when the step ends"),
        (graph(home="device"), (A, Offload("w"), Free("w"), B, C),
         "w must be on the device when the step ends"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named(one: TrainingGraph, steps: tuple[Step, ...], text: str) -> None:
    with pytest.raises(ScheduleError, match=f"invalid schedule at step [0-9]+: {text}"):
        judged(one, *steps)


def test_a_copy_that_hides_takes_no_time_and_one_that_does_not_is_a_stall() -> None:
    one = graph(Links(Link(100.0), Link(100.0), SIZE_BYTES))
    hidden = judged(one, A, Offload("a"), B, Free("a"), Fetch("a"), C)
    assert hidden.time_us == 40
    assert [(stall.step, stall.value, stall.us) for stall in hidden.stalls] == [(5, "a", 10)]
    assert hidden.moved_bytes == {"d2h": 1000, "h2d": 1000, "write": 0, "read": 0}
    assert (hidden.host_peak_bytes, hidden.stall_us) == (1000, 10)


def test_what_the_host_makes_counts_there() -> None:
    one = graph(roomy(host_bytes=2000))
    found = judged(one, A, Offload("a"), Compute("b", "host"), Fetch("b"), C)
    assert found.host_peak_bytes == 2000
    assert found.busy_us["host"] == 40


def test_a_value_with_a_home_below_is_no_resident_byte() -> None:
    one = graph(home="host")
    found = judged(one, Fetch("w"), A, Free("w"), B, C)
    assert found.peak_bytes == 3000
    assert found.host_peak_bytes == 1000
    assert judged(graph(home="device"), A, B, C).peak_bytes == 4000
