"""A graph that is full in several places, each by itself."""

from __future__ import annotations

from remat.graph_capture.graph import Op, TrainingGraph, Value


def humps(count: int) -> TrainingGraph:
    """So many times: a and b stay until `last`, but `big` comes between; then all are gone."""
    ops: list[Op] = []
    values: list[Value] = []
    before: tuple[str, ...] = ()
    for i in range(count):
        made = (("a", 3, 5.0), ("b", 3, 7.0), ("big", 6, 1.0), ("last", 0, 1.0))
        reads = {"a": before, "b": before, "big": (), "last": (f"a{i}", f"b{i}", f"big{i}")}
        for name, size_bytes, cost_us in made:
            ops.append(Op(f"{name}{i}", "t", "forward", reads[name], (f"{name}{i}",), cost_us))
            values.append(Value(f"{name}{i}", size_bytes, f"{name}{i}"))
        ops[-1] = Op(f"last{i}", "t", "forward", (f"a{i}", f"b{i}"), (f"last{i}",), 1.0)
        before = (f"last{i}",)
    return TrainingGraph("humps", tuple(ops), tuple(values))
