"""Graphs over a range of sizes that are made by hand, and small enough to look at each size."""

from __future__ import annotations

from typing import Any

import msgspec

from remat.graph_capture.graph import Op, Resident, TrainingGraph, Value
from remat.graph_capture.sizes.ranged_graph import Extent, RangedGraph
from remat.graph_capture.sizes.symbols import Symbol


def chain(
    size: str = "64*n",
    symbols: tuple[Symbol, ...] = (Symbol("n", 2, 40),),
    layers: int = 12,
    workspace_bytes: int = 0,
) -> RangedGraph:
    """Layers of forward, each of which keeps `size` bytes for its step of backward."""
    ops: list[Op] = []
    values: list[Value] = []
    extents: dict[str, Extent] = {}

    def add(name: str, phase: Any, inputs: tuple[str, ...], kind: Any, **more: Any) -> None:
        target = "remat.tangents" if name == "t" else "aten.mm"
        ops.append(Op(name, target, phase, inputs, (name,), cost_us=3, **more))
        values.append(Value(name, 0, name, kind))
        extents[name] = Extent(("n",), size if kind != "gradient" else "8")

    for i in range(layers):
        before = (f"f{i - 1}",) if i else ()
        kind = "output" if i == layers - 1 else "activation"
        add(f"f{i}", "forward", before, kind, workspace_bytes=workspace_bytes)
    add("t", "backward", (), "tangent", no_recompute="they arrive")
    last = "t"
    for i in reversed(range(layers)):
        reads = (f"f{i - 1}", last) if i else (last,)
        add(f"b{i}", "backward", reads, "activation" if i else "gradient")
        last = f"b{i}"
    outputs = (f"f{layers - 1}", "t", "b0")
    base = TrainingGraph(
        "Chain", tuple(ops), tuple(values), (f"f{layers - 1}",), outputs, Resident(100)
    )
    line = "x: [" + ", ".join(f"{{{symbol.name}}}" for symbol in symbols) + "]"
    graph = RangedGraph(base, symbols, extents, (line,), ("4*n",))
    return msgspec.structs.replace(graph, base=graph.top)
