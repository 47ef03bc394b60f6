"""A schedule as a trace for Perfetto and ``chrome://tracing``: lanes of ops, and live bytes.

The format is the "Trace Event Format" of Chromium: complete events (``X``) for runs of ops, a
counter (``C``) for bytes. Times are in µs.
"""

from __future__ import annotations

from typing import Any

import msgspec

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.schedules.views.palette import ROLES
from remat.schedules.views.timeline import Timeline, timeline

LANES = {"forward": 1, "backward": 2, "recompute": 3}
PROCESS = 1


def chrome_trace(graph: TrainingGraph, schedule: Schedule) -> dict[str, Any]:
    """The trace of a step, with a lane each for forward, backward and what runs again.

    ``otherData`` holds the figures of `simulate`. If the graph has no prices, each run takes 1 µs.

    Raises
    ------
    ScheduleError : the schedule was not made for the graph, or is invalid.
    """
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
        "traceEvents": [*_name_events(graph), *_run_events(line), *_counter_events(line)],
    }


def trace_file(graph: TrainingGraph, schedule: Schedule) -> bytes:
    """The trace as JSON."""
    return msgspec.json.encode(chrome_trace(graph, schedule))


def _name_events(graph: TrainingGraph) -> list[dict[str, Any]]:
    names = [("process_name", 0, f"{graph.name}, predicted")]
    names += [("thread_name", lane, name) for name, lane in LANES.items()]
    return [
        {"ph": "M", "pid": PROCESS, "tid": lane, "name": kind, "args": {"name": name}}
        for kind, lane, name in names
    ]


def _micros(line: Timeline, run: int) -> float:
    return float(line.edges[run]) * (1e3 if line.is_timed else 1.0)


def _run_events(line: Timeline) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for run in range(len(line)):
        op = line.op_of(run)
        lane = "recompute" if line.again[run] else op.phase
        events.append(
            {
                "ph": "X", "pid": PROCESS, "tid": LANES[lane], "cat": lane, "name": op.target,
                "ts": _micros(line, run), "dur": op.cost_us if line.is_timed else 1.0,
                "args": {
                    "op": op.name, "module": op.module, "source": op.source,
                    "live_bytes": int(line.live_bytes[run]),
                },
            }
        )  # fmt: skip
    return events


def _counter_events(line: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "ph": "C", "pid": PROCESS, "name": "live bytes", "ts": _micros(line, run),
            "args": {"bytes": int(line.live_bytes[run])},
        }
        for run in range(len(line))
    ]  # fmt: skip
