"""Files of other tools, read as those read them, against the simulator."""

from __future__ import annotations

import json
import pickle
import pickletools
import re
import warnings
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.exports import LANES, memory_snapshot, snapshot_file, to_dot, trace_file
from remat.schedules.palette import ROLES
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from tests.schedules.conftest import Planned
from tests.solver.graphs.random_graphs import gpt_like, training_graphs

VIEWER_READS = {
    "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME",
    "LONG1", "LONG_BINGET", "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP",
    "TUPLE2", "APPEND", "NEWFALSE", "BINPUT", "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE",
    "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "LONG_BINPUT", "LIST", "DICT", "SETITEM",
}  # fmt: skip
"""Pickle opcodes that torch/utils/viz/MemoryViz.js knows."""


def replayed(snapshot: dict[str, Any]) -> tuple[int, dict[int, int]]:
    """The most bytes allocated at once, and the blocks at the end, by address."""
    live: dict[int, int] = {}
    peak = 0
    (segment,) = snapshot["segments"]
    for event in snapshot["device_traces"][0]:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert address not in live
            assert (
                segment["address"] <= address <= segment["address"] + segment["total_size"] - size
            )
            live[address] = size
        elif event["action"] == "free_completed":
            assert live.pop(address) == size
        peak = max(peak, sum(live.values()))
    return peak, live


@given(training_graphs(max_ops=12))
@settings(max_examples=30, deadline=None)
def test_a_snapshot_allocates_what_the_simulator_counts(graph: TrainingGraph) -> None:
    schedule = solve_within(graph, 1 << 60, "chen_sqrt").schedule
    assert schedule is not None
    snapshot = memory_snapshot(graph, schedule)
    peak, live = replayed(snapshot)
    assert peak == simulate(graph, schedule).peak_bytes
    (segment,) = snapshot["segments"]
    blocks = segment["blocks"]
    assert sum(block["size"] for block in blocks) == segment["total_size"]
    active = {b["address"]: b["size"] for b in blocks if b["state"] == "active_allocated"}
    assert active == live
    ends = [block["address"] + block["size"] for block in blocks]
    assert [block["address"] for block in blocks[1:]] == ends[:-1]


def test_a_snapshot_opens_in_torchs_viewers(planned: Planned) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.cuda import _memory_viz as viewers

    data = snapshot_file(planned.graph, planned.schedule)
    snapshot = pickle.loads(data)
    assert replayed(snapshot)[0] == planned.result.peak_bytes
    assert "Active Memory Timeline" in viewers.trace_plot(snapshot)
    assert "Allocator State History" in viewers.segment_plot(snapshot)
    assert "total_allocated" in viewers.segsum(snapshot)
    assert "aten.bmm.default" in viewers.memory(snapshot, format_flamegraph=lambda text: text) or (
        "parameters" in viewers.memory(snapshot, format_flamegraph=lambda text: text)
    )
    assert viewers.trace(snapshot).startswith("Device 0")
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert opcodes <= VIEWER_READS
    assert data[:2] == b"\x80\x04"


def test_frames_name_op_module_and_line(planned: Planned) -> None:
    events = memory_snapshot(planned.graph, planned.schedule)["device_traces"][0]
    frames = [event["frames"] for event in events if len(event["frames"]) == 2]
    names = {(inner["name"], outer["name"]) for inner, outer in frames}
    op = next(op for op in planned.graph.ops if op.module == "blocks.1.mlp.0")
    assert (f"{op.name}: {op.target}", op.module) in names
    file, _, line = op.source.rpartition(":")
    assert any(f[0]["filename"] == file and f[0]["line"] == int(line) for f in frames)


def test_a_trace_adds_up_to_the_simulation(planned: Planned) -> None:
    trace = json.loads(trace_file(planned.graph, planned.schedule))
    found = simulate(planned.graph, planned.schedule)
    runs = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sum(event["dur"] for event in runs) == pytest.approx(found.time_us)
    ends = [event["ts"] + event["dur"] for event in runs]
    assert max(ends) == pytest.approx(found.time_us)
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert max(event["args"]["bytes"] for event in counters) == found.peak_bytes
    assert trace["otherData"]["peak_bytes"] == found.peak_bytes
    spent: dict[int, float] = defaultdict(float)
    for event in runs:
        spent[event["tid"]] += event["dur"]
    assert spent[LANES["recompute"]] == pytest.approx(found.time_us - planned.graph.time_us)
    named = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == set(LANES)


def test_dot_has_every_op_and_marks_what_runs_again(planned: Planned) -> None:
    text = to_dot(planned.graph, planned.schedule)
    nodes = dict(re.findall(r'^ *"([^"]+)" \[label="((?:[^"\\]|\\.)*)"', text, re.M))
    assert set(nodes) == {op.name for op in planned.graph.ops}
    counts = planned.schedule.computations()
    again = {name for name, label in nodes.items() if "times" in label}
    assert again == {name for name, count in counts.items() if count > 1}
    assert text.count(f'fillcolor="{ROLES["recompute"]}"') == len(again)
    edges = re.findall(r'^  "([^"]+)" -> "([^"]+)"', text, re.M)
    read = sum(
        bool(planned.graph.value_by_name[name].producer)
        for op in planned.graph.ops
        for name in op.inputs
    )
    assert len(edges) == read
    assert "times" not in to_dot(planned.graph)
    assert text.count("{") == text.count("}")


def test_a_quote_in_a_name_stays_a_name() -> None:
    graph = gpt_like(1)
    ops = tuple(
        type(op)(
            **{name: getattr(op, name) for name in op.__struct_fields__} | {"module": 'a"b\\c'}
        )
        for op in graph.ops
    )
    named = TrainingGraph("G", ops, graph.values, graph.forward_outputs, graph.outputs)
    assert 'label="a\\"b\\\\c"' in to_dot(named)
