"""What is said of copies: figures of a chain that a hand finds, and of the simulator elsewhere."""

from __future__ import annotations

import msgspec
import pytest

from remat.analysis.levers import (
    OFFLOAD,
    RECOMPUTATION,
    levers_of,
    without_copies,
    without_recomputation,
)
from remat.analysis.plan_figures import SLOWER, offloaded, too_small_host
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule
from remat.schedules.simulate import simulate
from remat.schedules.value_report.peak_holders import counterfactual_schedule
from remat.solver import solve_within
from tests.copying import BUDGET_BYTES, copying_chain, copying_result, copying_schedule


def test_by_hand_bytes_waits_and_slower_links() -> None:
    """At .8 of the rate a copy takes 12.5 us: a comes back at 45.5, 2.5 us later than now."""
    graph = copying_chain()
    found = offloaded(graph, copying_schedule(graph))
    assert found is not None
    assert [(one.link, one.copies, one.moved_bytes) for one in found.links] == [
        ("d2h", 1, 100), ("h2d", 1, 100)
    ]  # fmt: skip
    assert [one.busy_us for one in found.links] == [10.0, 10.0]
    assert (found.host_bytes, found.host_room_bytes, found.nvme_bytes) == (100, 500, 0)
    assert (found.stalls, found.stall_us, found.longest_us) == (1, 9.0, 9.0)
    assert found.slower_us == pytest.approx(2.5)
    assert found.slower_overhead == pytest.approx(46.5 / 35 - 1)
    assert found.source == "a test"


def test_each_figure_has_a_line() -> None:
    graph = copying_chain()
    found = offloaded(graph, copying_schedule(graph))
    assert found is not None
    assert list(found.rows()) == [
        ("host", "0.1 KiB of 0.5 KiB"),
        ("copies", "1 to the host, 0.1 KiB in 10.0 us; 1 back, 0.1 KiB in 10.0 us"),
        ("waits", "the device waits 9.0 us for copies, 9.0 us at most at a time"),
        ("slower links",
         "at 0.8 of these rates a step takes 2.5 us longer, 32.9 % overhead; peaks stay the same"),
        ("links", "d2h 0.01 GB/s, h2d 0.01 GB/s: a test"),
    ]  # fmt: skip
    quick = copying_chain(gb_s=1.0)
    quicker = offloaded(quick, copying_schedule(quick))
    assert quicker is not None
    assert dict(quicker.rows())["waits"] == "none: the device never waits for a copy"


def test_a_schedule_that_copies_nothing_says_nothing() -> None:
    graph = copying_chain()
    everything = solve_within(graph, 1 << 40, "store_all").schedule
    assert offloaded(graph, everything) is None
    assert offloaded(graph, None) is None


@pytest.mark.parametrize(
    ("host_bytes", "nvme_bytes", "said"),
    [
        (
            99, 300, "give host='200B': on its way to NVMe a value is on the host as a whole, "
            "and 2 of 3 are larger than it",
        ),
        (100, 300, ""), (99, 0, ""),
    ],
)  # fmt: skip
def test_nvme_that_no_value_can_reach_is_told(host_bytes: int, nvme_bytes: int, said: str) -> None:
    graph = copying_chain()
    links = graph.links
    assert links is not None
    links = msgspec.structs.replace(links, host_bytes=host_bytes, nvme_bytes=nvme_bytes)
    assert too_small_host(msgspec.structs.replace(graph, links=links)) == said
    assert too_small_host(msgspec.structs.replace(graph, links=None)) == ""


def test_a_third_tier_has_its_own_bytes() -> None:
    graph = copying_chain()
    links = graph.links
    assert links is not None
    links = msgspec.structs.replace(
        links, write=links.d2h, read=links.h2d, nvme_bytes=300, nvme_path="/mnt/nvme"
    )
    graph = msgspec.structs.replace(graph, links=links)
    below = [Offload("a", "nvme"), Free("a", "host"), Fetch("a", "host")]
    steps = list(copying_schedule(graph).steps)
    steps[5:5] = below
    found = offloaded(graph, Schedule.for_graph(graph, [*steps, Free("a", "nvme")]))
    assert found is not None
    assert [one.link for one in found.links] == ["d2h", "h2d", "write", "read"]
    assert dict(found.rows())["host"] == (
        "0.1 KiB of 0.5 KiB; NVMe 0.1 KiB of 0.3 KiB in /mnt/nvme"
    )


def test_the_lever_is_beside_the_same_plan_without_it() -> None:
    """Without, a + b + c + gc = 250 are live; solved without, a is made again for 5 us."""
    graph = copying_chain()
    schedule = copying_schedule(graph)
    asked: list[TrainingGraph] = []

    def solve_without(off: TrainingGraph) -> object:
        asked.append(off)
        return solve_within(off, BUDGET_BYTES)

    (lever,) = levers_of(graph, schedule, solve_without)  # type: ignore[arg-type]
    assert (lever.name, lever.peak_bytes, lever.off_bytes) == (OFFLOAD, 1160, 1250)
    assert lever.extra == pytest.approx(9 / 35)
    assert lever.off_fits
    assert lever.off_overhead == pytest.approx(5 / 35)
    assert [off.links for off in asked] == [None]
    off = without_copies(graph, schedule)
    assert not off[1].moves
    assert off[1].computations() == schedule.computations()


def both() -> Schedule:
    """a goes to the host, and b is made again from it."""
    steps = (
        Compute("a"), Offload("a"), Compute("b"), Free("a"), Compute("c"), Free("b"),
        Compute("gc"), Free("c"), Fetch("a"), Compute("b"), Compute("gb"), Free("gc"), Free("b"),
        Compute("ga"), Free("a"), Free("gb"), Free("a", "host"),
    )  # fmt: skip
    return Schedule.for_graph(copying_chain(), steps, solver="joint")


def test_both_levers_of_one_plan() -> None:
    graph = copying_chain()
    again, copies = levers_of(graph, both())
    assert (again.name, copies.name) == (RECOMPUTATION, OFFLOAD)
    planned, once = without_recomputation(graph, both())
    assert max(once.computations().values()) == 1
    assert once.moves
    assert simulate(planned, once).peak_bytes == again.off_bytes


def test_a_value_that_stays_is_not_copied() -> None:
    graph = copying_chain()
    kept = counterfactual_schedule(graph, both(), "a")
    assert not kept.moves
    assert simulate(graph, kept).peak_bytes >= simulate(graph, both()).peak_bytes
    once = counterfactual_schedule(graph, copying_schedule(graph), "a")
    assert not once.moves
    assert simulate(graph, once).time_us == graph.time_us


def test_the_slower_links_are_not_those_of_the_plan() -> None:
    graph = copying_chain()
    schedule, links = copying_schedule(graph), graph.links
    assert links is not None
    slow = simulate(graph, schedule, links.slower(SLOWER))
    here = copying_result(graph)
    assert slow.time_us > here.time_us
    assert slow.peak_bytes == here.peak_bytes
