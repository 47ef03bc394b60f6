"""A schedule as a PyTorch memory snapshot, as if a CUDA allocator had recorded the step.

The dictionary has the form of `torch.cuda.memory._snapshot()`. Pickled, it opens in the viewer
at https://pytorch.org/memory_viz and with ``python -m torch.cuda._memory_viz``. Its trace
allocates and frees what `simulate` counts, so its highest sum is the simulated peak.
"""

from __future__ import annotations

import pickle
from bisect import insort
from dataclasses import dataclass, field
from typing import Any

from remat.graph_capture.graph import Op, TrainingGraph
from remat.schedules.derived import graph_of_schedule
from remat.schedules.schedule import (
    Compute,
    Schedule,
    fetched_value,
    freed_value,
    workspaces_of_updates,
)
from remat.schedules.views.timeline import timeline

_BASE = 0x7F00_0000_0000
"""Where addresses begin. Any number would do."""

_VIEWER_PROTOCOL = 4
"""The newest version of pickles that the viewer in the browser reads."""

_Frame = dict[str, Any]
_Event = dict[str, Any]


@dataclass
class _Arena:
    """Addresses. Each block goes into the lowest hole that it fits into."""

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
    blocks: dict[str, tuple[int, int, list[_Frame]]] = field(
        default_factory=dict[str, tuple[int, int, list[_Frame]]]
    )

    def alloc(self, name: str, size: int, frames: list[_Frame], time_us: int) -> None:
        # Values of 0 bytes are never allocated, so `free` skips them too.
        if size:
            address = self.arena.take(size)
            self.blocks[name] = address, size, frames
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
    for category, size in _resident(graph):
        recording.alloc(f"resident {category}", size, [_frame(category, "", 0)], 0)
    run = 0
    for step in schedule.steps:
        # Edges are in ms, or count runs if there are no costs. The last one ends the step.
        now_us = int(1e3 * line.edges[run])
        if isinstance(step, Compute):
            op = graph.ops[graph.op_index[step.op]]
            workspace_bytes = updates.get(op.name, op.workspace_bytes)
            _run_op(recording, graph, op, workspace_bytes, now_us)
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
        # If an output is live already, the run makes a second copy, which goes when the run ends.
        copy = f"{name} again" if name in recording.blocks else name
        recording.alloc(copy, graph.value_by_name[name].size_bytes, frames, now_us)
    recording.alloc("workspace", workspace_bytes, [_frame("workspace", "", 0), *frames], now_us)
    recording.free("workspace", now_us)
    for name in op.outputs:
        recording.free(f"{name} again", now_us)


def _frames_of(op: Op) -> list[_Frame]:
    # The op is the innermost frame, its module the outer one; both point to the user's line.
    file, _, line = op.source.rpartition(":")
    if not line.isdigit():
        file, line = op.source, "0"
    frames = [_frame(f"{op.name}: {op.target}", file, int(line))]
    return [*frames, _frame(op.module, file, int(line))] if op.module else frames


def _frame(name: str, file: str, line: int) -> _Frame:
    return {"name": name, "filename": file, "line": line}


def _resident(graph: TrainingGraph) -> list[tuple[str, int]]:
    resident = graph.resident
    fields = ("parameters", "buffers", "batch", "gradients", "optimizer", "libraries")
    categories = [(name, int(getattr(resident, f"{name}_bytes"))) for name in fields]
    return [*categories, ("communication", resident.communication_bytes)]


def _growth(recording: _Recording) -> _Event:
    # One segment, there from the start, that reaches to the highest address used.
    size = recording.arena.top - _BASE
    return {
        "action": "segment_alloc", "addr": _BASE, "size": size, "stream": 0, "frames": [],
        "time_us": 0,
    }  # fmt: skip


def _segment(recording: _Recording) -> dict[str, Any]:
    live = [
        _block(address, size, "active_allocated", frames)
        for address, size, frames in recording.blocks.values()
    ]
    gaps = [_block(begin, end - begin, "inactive", []) for begin, end in recording.arena.holes]
    allocated = sum(size for _, size, _ in recording.blocks.values())
    return {
        "device": 0,
        "address": _BASE,
        "total_size": recording.arena.top - _BASE,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": allocated,
        "is_expandable": False,
        "frames": [],
        "blocks": sorted([*live, *gaps], key=lambda block: block["address"]),
    }


def _block(address: int, size: int, state: str, frames: list[_Frame]) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": state,
        "frames": frames,
    }
