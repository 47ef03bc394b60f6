"""A schedule as a trace for Perfetto and ``chrome://tracing``: lanes of ops and links, live bytes.

The format is the "Trace Event Format" of Chromium: complete events (``X``) for runs of ops, a
counter (``C``) for bytes. Times are in µs.
"""

from __future__ import annotations

from typing import Any

import msgspec

from remat.graph_capture.graph import LINK_NAMES, LINK_TITLES, TrainingGraph
from remat.schedules.schedule import Schedule
from remat.schedules.simulation import Simulation
from remat.schedules.views.palette import ROLES
from remat.schedules.views.timeline import Timeline, timeline

LANES = {"forward": 1, "backward": 2, "recompute": 3}
LINK_LANES = {name: len(LANES) + 1 + i for i, name in enumerate(LINK_NAMES)}
_PROCESS = 1


def chrome_trace(graph: TrainingGraph, schedule: Schedule) -> dict[str, Any]:
    line = timeline(graph, schedule)
    found = line.simulation
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "model": graph.name,
            "peak_bytes": found.peak_bytes,
            "time_us": found.time_us,
            "overhead": found.overhead,
            "budget_bytes": schedule.budget_bytes,
            "colours": ROLES,
        },
        "traceEvents": [
            *_name_events(graph, found),
            *_run_events(line),
            *_copy_events(graph, found),
            *_counter_events(line),
            *_below_events(found),
        ],
    }


def trace_file(graph: TrainingGraph, schedule: Schedule) -> bytes:
    return msgspec.json.encode(chrome_trace(graph, schedule))


def _name_events(graph: TrainingGraph, found: Simulation) -> list[dict[str, Any]]:
    names = [("process_name", 0, f"{graph.name}, predicted")]
    names += [("thread_name", lane, name) for name, lane in LANES.items()]
    # Leave out lanes of links that copy nothing.
    used = {copy.link for copy in found.copies}
    names += [
        ("thread_name", LINK_LANES[one], LINK_TITLES[one]) for one in LINK_NAMES if one in used
    ]
    return [
        {"ph": "M", "pid": _PROCESS, "tid": lane, "name": kind, "args": {"name": name}}
        for kind, lane, name in names
    ]


def _micros(line: Timeline, run: int) -> float:
    # Edges are in ms. Without costs they count runs, and each takes 1 µs.
    return float(line.edges[run]) * (1e3 if line.is_timed else 1.0)


def _run_events(line: Timeline) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for run in range(len(line)):
        op = line.op_of(run)
        lane = "recompute" if line.again[run] else op.phase
        events.append(
            {
                "ph": "X", "pid": _PROCESS, "tid": LANES[lane], "cat": lane, "name": op.target,
                "ts": _micros(line, run), "dur": op.cost_us if line.is_timed else 1.0,
                "args": {
                    "op": op.name, "module": op.module, "source": op.source,
                    "live_bytes": int(line.live_bytes[run]),
                },
            }
        )  # fmt: skip
    return events


def _copy_events(graph: TrainingGraph, found: Simulation) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X", "pid": _PROCESS, "tid": LINK_LANES[copy.link], "cat": "copy",
            "name": copy.value, "ts": copy.start_us, "dur": copy.end_us - copy.start_us,
            "args": {
                "link": copy.link, "bytes": copy.size_bytes,
                "op": graph.value_by_name[copy.value].producer,
            },
        }
        for copy in found.copies
    ]  # fmt: skip


def _below_events(found: Simulation) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for tier, there in found.below_bytes.items():
        before = 0
        # Lower tiers are booked by steps, so the device's clock at that step is shown.
        for at_us, size_bytes in zip(found.clock_us, there, strict=True):
            if size_bytes != before:
                events.append(
                    {
                        "ph": "C", "pid": _PROCESS, "name": f"{tier} bytes", "ts": at_us,
                        "args": {"bytes": size_bytes},
                    }
                )  # fmt: skip
            before = size_bytes
    return events


def _counter_events(line: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "ph": "C", "pid": _PROCESS, "name": "live bytes", "ts": _micros(line, run),
            "args": {"bytes": int(line.live_bytes[run])},
        }
        for run in range(len(line))
    ]  # fmt: skip
