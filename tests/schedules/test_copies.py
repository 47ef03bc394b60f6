"""Copies in pictures: the simulator's, with their starts and ends, in the trace and on the page."""

from __future__ import annotations

import json
from typing import Any

from remat.analysis.plan_report import page_facts, report
from remat.schedules.exports import LINK_LANES, chrome_trace, memory_snapshot, trace_file
from remat.schedules.report.svg import COPIES_WIDTH, LANE, copies_picture
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from tests.copying import copying_chain, copying_result, copying_schedule


def test_the_judge_tells_each_copy() -> None:
    graph = copying_chain()
    found = simulate(graph, copying_schedule(graph))
    assert [(c.step, c.link, c.value, c.start_us, c.end_us) for c in found.copies] == [
        (1, "d2h", "a", 5.0, 15.0), (7, "h2d", "a", 33.0, 43.0)
    ]  # fmt: skip
    assert found.moved_bytes["d2h"] == found.copies[0].size_bytes == 100
    assert found.below_bytes == {"host": (0, *[100] * 13, 0)}
    assert max(found.below_bytes["host"]) == found.host_peak_bytes
    assert found.busy_us["d2h"] == 10.0


def test_without_copies_nothing_is_told() -> None:
    graph = copying_chain()
    everything = solve_within(graph, 1 << 40, "store_all")
    assert everything.schedule is not None
    found = simulate(graph, everything.schedule)
    assert found.copies == ()
    assert found.below_bytes == {}
    assert copies_picture(page_facts(graph, everything)) is None
    assert "Copies between device and host" not in report(graph, everything)
    trace = chrome_trace(graph, everything.schedule)
    assert {event["tid"] for event in trace["traceEvents"] if "tid" in event} <= {0, 1, 2, 3}


def test_the_trace_has_a_lane_a_link_and_a_counter_a_tier() -> None:
    graph = copying_chain()
    schedule = copying_schedule(graph)
    events: list[dict[str, Any]] = json.loads(trace_file(graph, schedule))["traceEvents"]
    copies = [event for event in events if event.get("cat") == "copy"]
    assert [(e["tid"], e["name"], e["ts"], e["dur"]) for e in copies] == [
        (LINK_LANES["d2h"], "a", 5.0, 10.0), (LINK_LANES["h2d"], "a", 33.0, 10.0)
    ]  # fmt: skip
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes[LINK_LANES["d2h"]] == "device to host"
    assert LINK_LANES["write"] not in lanes
    there = [(e["ts"], e["args"]["bytes"]) for e in events if e["name"] == "host bytes"]
    assert there == [(5.0, 100), (44.0, 0)]
    ga = next(e for e in events if e.get("args", {}).get("op") == "ga" and e["cat"] != "copy")
    assert ga["ts"] == 43.0


def test_the_memory_snapshot_is_of_the_device_alone() -> None:
    graph = copying_chain()
    snapshot = memory_snapshot(graph, copying_schedule(graph))
    assert "host" not in json.dumps(snapshot, default=str)


def test_the_page_has_lanes_waits_and_a_band() -> None:
    graph = copying_chain()
    result = copying_result(graph)
    picture = copies_picture(page_facts(graph, result))
    assert picture is not None
    assert [lane.name for lane in picture.lanes] == [
        "device to host", "host to device", "device waits"
    ]  # fmt: skip
    down, _, waits = picture.lanes
    (bar,) = down.bars
    assert (bar.x, bar.width) == (
        round(COPIES_WIDTH * 5 / 44),
        round(COPIES_WIDTH * 15 / 44) - bar.x,
    )
    assert bar.title == "a, 0.1 KiB in 10.0 us"
    (wait,) = waits.bars
    assert (wait.x, wait.title) == (round(COPIES_WIDTH * 34 / 44), "9.0 us for a")
    (band,) = picture.bands
    assert (band.name, band.most) == ("on the host", "0.1 KiB")
    assert band.y > waits.y + LANE
    page = report(graph, result)
    assert "Copies between device and host" in page
    assert f"<title>{bar.title}</title>" in page
    assert "2 copies: 0.1 KiB device to host, 0.1 KiB host to device; the device waits" in page
    assert page.count("<small>copied to the host, ") == 1
