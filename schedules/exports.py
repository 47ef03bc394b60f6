"""Schedules for tools that people have open already: Graphviz, Perfetto, PyTorch's memory viewer.

A ``.pt2`` file was tried: netron refuses ops of backward that it does not know.
"""

from __future__ import annotations

import math
import pickle
from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from remat.formats import bytes_text, time_text
from remat.graph_capture.graph import LINK_NAMES, LINK_TITLES, Op, TrainingGraph
from remat.schedules.derived import graph_of_schedule
from remat.schedules.palette import ROLES
from remat.schedules.schedule import (
    Compute,
    Schedule,
    fetched_value,
    freed_value,
    workspaces_of_updates,
)
from remat.schedules.simulate import Simulation
from remat.schedules.timeline import Timeline, layer_of, timeline

# A graph as text for Graphviz: ops in boxes of their layers, in the colours of the plots.

_HEAD = (
    "  rankdir=TB;",
    '  node [shape=box, style="filled,rounded", fontname="sans-serif", fontsize=10];',
    '  edge [color="#999999"];',
)


def to_dot(graph: TrainingGraph, schedule: Schedule | None = None) -> str:
    """The graph in the DOT language; with a schedule, ops that run again say how often they run."""
    runs = Counter(op.name for op in graph.ops)
    if schedule is not None:
        graph = graph_of_schedule(graph, schedule)
        schedule.check_made_for(graph)
        runs = schedule.computations()
    lines = [f"digraph {_quoted(graph.name)} {{", *_HEAD]
    clusters: dict[str, list[Op]] = {}
    for op in graph.ops[: graph.n_forward]:  # backward ops are drawn outside of the boxes of layers
        clusters.setdefault(layer_of(op.module), []).append(op)
    for i, (title, ops) in enumerate(clusters.items()):
        lines += [f"  subgraph cluster_{i} {{", f"    label={_quoted(title)};"]
        lines += [f"    {_node(graph, op, runs[op.name])}" for op in ops]
        lines.append("  }")
    lines += [f"  {_node(graph, op, runs[op.name])}" for op in graph.ops[graph.n_forward :]]
    lines += _edges(graph)
    return "\n".join([*lines, "}", ""])


def _node(graph: TrainingGraph, op: Op, runs: int) -> str:
    size = sum(graph.value_by_name[name].size_bytes for name in op.outputs)
    facts = [op.name, op.target, bytes_text(size)]
    if op.cost_us:
        facts.append(time_text(op.cost_us))
    if runs > 1:
        facts.append(f"runs {runs} times")
    colour = ROLES["recompute" if runs > 1 else op.phase]
    ink = "#ffffff" if colour == ROLES["forward"] else "#000000"  # black is unreadable on it
    label = "\\n".join(_escaped(fact) for fact in facts)
    tip = _quoted(" ".join(part for part in (op.module, op.source) if part))
    return (
        f'{_quoted(op.name)} [label="{label}", fillcolor="{colour}", fontcolor="{ink}", '
        f"tooltip={tip}];"
    )


def _edges(graph: TrainingGraph) -> list[str]:
    lines: list[str] = []
    for op in graph.ops:
        for name in op.inputs:
            if (value := graph.value_by_name[name]).producer:
                # Sizes span powers of ten: a factor of 1,000 widens a line by 1.
                width = 0.5 + math.log10(max(value.size_bytes, 1)) / 3
                ends = f"{_quoted(value.producer)} -> {_quoted(op.name)}"
                tip = _quoted(f"{name} {bytes_text(value.size_bytes)}")
                lines.append(f"  {ends} [penwidth={width:.1f}, tooltip={tip}];")
    return lines


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


# A trace for Perfetto and ``chrome://tracing`` in Chromium's "Trace Event Format", times in µs.

LANES = {"forward": 1, "backward": 2, "recompute": 3}
LINK_LANES = {name: len(LANES) + 1 + i for i, name in enumerate(LINK_NAMES)}
_PROCESS = 1


def chrome_trace(graph: TrainingGraph, schedule: Schedule) -> dict[str, Any]:
    line = timeline(graph, schedule)
    found = line.simulation
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "model": graph.name, "peak_bytes": found.peak_bytes, "time_us": found.time_us,
            "overhead": found.overhead, "budget_bytes": schedule.budget_bytes, "colours": ROLES,
        },
        "traceEvents": [
            *_name_events(graph, found), *_run_events(line), *_copy_events(graph, found),
            *_counter_events(line), *_below_events(found),
        ],
    }  # fmt: skip


def trace_file(graph: TrainingGraph, schedule: Schedule) -> bytes:
    return msgspec.json.encode(chrome_trace(graph, schedule))


def _name_events(graph: TrainingGraph, found: Simulation) -> list[dict[str, Any]]:
    names = [("process_name", 0, f"{graph.name}, predicted")]
    names += [("thread_name", lane, name) for name, lane in LANES.items()]
    used = {copy.link for copy in found.copies}  # leave out lanes of links that copy nothing
    names += [("thread_name", LINK_LANES[n], LINK_TITLES[n]) for n in LINK_NAMES if n in used]
    return [
        {"ph": "M", "pid": _PROCESS, "tid": lane, "name": kind, "args": {"name": name}}
        for kind, lane, name in names
    ]


def _micros(line: Timeline, run: int) -> float:
    # Without costs, edges count runs, and each takes 1 µs.
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
        # Lower tiers are booked by steps, so the device's clock there is shown.
        for at_us, size_bytes in zip(found.clock_us, there, strict=True):
            if size_bytes != before:
                event = {"ph": "C", "pid": _PROCESS, "name": f"{tier} bytes", "ts": at_us}
                events.append(event | {"args": {"bytes": size_bytes}})
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


# A snapshot as `torch.cuda.memory._snapshot()` makes it; pickled for https://pytorch.org/memory_viz.

_BASE = 0x7F00_0000_0000  # Where addresses begin. Any number would do.

_VIEWER_PROTOCOL = 4  # the newest version of pickles that the viewer in the browser reads

_Frame = dict[str, Any]
_Event = dict[str, Any]
_Block = tuple[int, int, list[_Frame]]  # address, size, and who asked for it


@dataclass
class _Arena:
    """Each block goes into the lowest hole that it fits into."""

    holes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    top: int = _BASE

    def take(self, size: int) -> int:
        for i, (begin, end) in enumerate(self.holes):
            if end - begin >= size:
                self.holes[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        self.top += size
        return self.top - size

    def give(self, address: int, size: int) -> None:
        insort(self.holes, (address, address + size))
        i = self.holes.index((address, address + size))
        for j in (i, i - 1):  # the upper hole first: joining the lower one shifts indices
            if 0 <= j < len(self.holes) - 1 and self.holes[j][1] == self.holes[j + 1][0]:
                self.holes[j : j + 2] = [(self.holes[j][0], self.holes[j + 1][1])]


@dataclass
class _Recording:
    arena: _Arena = field(default_factory=_Arena)
    events: list[_Event] = field(default_factory=list[_Event])
    blocks: dict[str, _Block] = field(default_factory=dict[str, _Block])

    def alloc(self, name: str, size: int, frames: list[_Frame], time_us: int) -> None:
        if size:  # values of 0 bytes are never allocated, so `free` skips them too
            self.blocks[name] = self.arena.take(size), size, frames
            self._tell("alloc", name, time_us)

    def free(self, name: str, time_us: int) -> None:
        if name in self.blocks:
            # torch records both; on a single stream they come together.
            self._tell("free_requested", name, time_us)
            self._tell("free_completed", name, time_us)
            address, size, _ = self.blocks.pop(name)
            self.arena.give(address, size)

    def _tell(self, action: str, name: str, time_us: int) -> None:
        address, size, frames = self.blocks[name]
        event = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us}
        self.events.append(event | {"frames": frames})


def memory_snapshot(graph: TrainingGraph, schedule: Schedule) -> dict[str, Any]:
    graph = graph_of_schedule(graph, schedule)
    line = timeline(graph, schedule)
    updates = workspaces_of_updates(graph, schedule)
    recording = _Recording()
    for name, size in graph.resident.parts().items():
        category = name.removesuffix("_bytes")
        recording.alloc(f"resident {category}", size, [_frame(category, "", 0)], 0)
    run = 0
    for step in schedule.steps:
        now_us = int(1e3 * line.edges[run])  # in ms, or runs; the last edge ends the step
        if isinstance(step, Compute):
            op = graph.ops[graph.op_index[step.op]]
            _run_op(recording, graph, op, updates.get(op.name, op.workspace_bytes), now_us)
            run += 1
        elif fetched_value(step):
            value = graph.value_by_name[step.value]
            recording.alloc(step.value, value.size_bytes, [_frame("fetch", "", 0)], now_us)
        elif freed_value(step):
            recording.free(step.value, now_us)
    return {
        "segments": [_segment(recording)],
        "device_traces": [[_growth(recording), *recording.events]],
        "allocator_settings": {},
        "external_annotations": [],
    }


def snapshot_file(graph: TrainingGraph, schedule: Schedule) -> bytes:
    return pickle.dumps(memory_snapshot(graph, schedule), protocol=_VIEWER_PROTOCOL)


def _run_op(
    recording: _Recording, graph: TrainingGraph, op: Op, workspace_bytes: int, now_us: int
) -> None:
    frames = _frames_of(op)
    for name in op.outputs:
        # A second copy of an output that is live goes when the run ends.
        copy = f"{name} again" if name in recording.blocks else name
        recording.alloc(copy, graph.value_by_name[name].size_bytes, frames, now_us)
    recording.alloc("workspace", workspace_bytes, [_frame("workspace", "", 0), *frames], now_us)
    recording.free("workspace", now_us)
    for name in op.outputs:
        recording.free(f"{name} again", now_us)


def _frames_of(op: Op) -> list[_Frame]:
    file, _, line = op.source.rpartition(":")  # both frames point to the user's line
    if not line.isdigit():
        file, line = op.source, "0"
    frames = [_frame(f"{op.name}: {op.target}", file, int(line))]
    return [*frames, _frame(op.module, file, int(line))] if op.module else frames


def _frame(name: str, file: str, line: int) -> _Frame:
    return {"name": name, "filename": file, "line": line}


def _growth(recording: _Recording) -> _Event:
    size = recording.arena.top - _BASE  # one segment, there from the start
    return {
        "action": "segment_alloc", "addr": _BASE, "size": size, "stream": 0, "frames": [],
        "time_us": 0,
    }  # fmt: skip


def _segment(recording: _Recording) -> dict[str, Any]:
    blocks = recording.blocks.values()
    live = [_block(address, size, "active_allocated", frames) for address, size, frames in blocks]
    gaps = [_block(begin, end - begin, "inactive", []) for begin, end in recording.arena.holes]
    allocated = sum(size for _, size, _ in blocks)
    return {
        "device": 0, "address": _BASE, "total_size": recording.arena.top - _BASE, "stream": 0,
        "segment_type": "large", "segment_pool_id": (0, 0), "allocated_size": allocated,
        "active_size": allocated, "requested_size": allocated, "is_expandable": False,
        "frames": [], "blocks": sorted([*live, *gaps], key=lambda block: block["address"]),
    }  # fmt: skip


def _block(address: int, size: int, state: str, frames: list[_Frame]) -> dict[str, Any]:
    place = {"address": address, "size": size, "requested_size": size}
    return place | {"state": state, "frames": frames}
