"""Graphs of more than one folder's tests: the reference instances, modules by turns, peaks."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.solver import solve_within
from tests.paths import BENCH

UNLIMITED_BYTES = 1 << 60
MODULES = ("blocks.0.norm", "blocks.0.attn", "blocks.1.norm", "blocks.1.mlp", "head")


def peak_bytes_of(graph: TrainingGraph) -> int:
    """Peak of the step that keeps everything."""
    return solve_within(graph, UNLIMITED_BYTES, "store_all").peak_bytes


def graph_from_nodes(data: dict[str, Any]) -> TrainingGraph:
    """A graph of the reference files: one value a node, nothing live at the end."""
    node = {entry["id"]: entry for entry in data["nodes"]}
    reads: dict[int, list[str]] = {i: [] for i in data["order"]}
    for source, target in data["edges"]:
        reads[target].append(f"n{source}")
    ops = [
        Op(f"n{i}", "node", "forward", tuple(reads[i]), (f"n{i}",), float(node[i]["cost"]))
        for i in data["order"]
    ]
    values = [Value(f"n{i}", node[i]["bytes"], f"n{i}") for i in data["order"]]
    return TrainingGraph("reference", tuple(ops), tuple(values))


def tiny_cases() -> list[Any]:
    """The reference graphs with their optima, as parameters; skipped where they are not there."""
    if not (BENCH / "tiny_exact.json").exists():
        reason = f"the reference instances are not at {BENCH}"
        return [pytest.param({}, marks=pytest.mark.skip(reason=reason))]
    graphs = json.loads((BENCH / "tiny_exact.json").read_text())["graphs"]
    return [pytest.param(data, id=data["name"]) for data in graphs]


def with_modules(graph: TrainingGraph, period: int = 1) -> TrainingGraph:
    """`graph` with its forward ops in modules of `MODULES`, `period` ops each in turn."""
    ops = tuple(
        msgspec.structs.replace(op, module=MODULES[i // period % len(MODULES)])
        if op.phase == "forward"
        else op
        for i, op in enumerate(graph.ops)
    )
    return msgspec.structs.replace(graph, ops=ops)
