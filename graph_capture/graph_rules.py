"""The rules that a training graph must keep for its schedules to mean anything.

Each rule is checked in one pass over the graph. Errors name the place and the way out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from remat.graph_capture.errors import GraphError

if TYPE_CHECKING:
    from remat.graph_capture.graph import Op, TrainingGraph, Value

MOST_BYTES = 1 << 62
"""Sums below it stay exact in 64-bit integers, and so does twice a sum."""
MOST_US = 1e100
"""Sums and squares of what is below it are finite."""
MOST_FIGURE = 10**300
"""What is below it can be shown, since floats reach further. Budgets may be that large."""


def are_figures(*numbers: float) -> bool:
    """Whether all numbers are defined, from 0 on, and small enough to be shown."""
    return all(0 <= number < MOST_FIGURE for number in numbers)


def check_graph(graph: TrainingGraph) -> None:
    """Raise `GraphError` unless ops can run in their order on the values given."""
    values = {value.name: value for value in graph.values}
    if len(values) != len(graph.values):
        raise GraphError("two values have the same name")
    if len({op.name for op in graph.ops}) != len(graph.ops):
        raise GraphError("two ops have the same name")
    for value in graph.values:
        if value.size_bytes < 0:
            raise GraphError(f"value {value.name} has a negative size: {value.size_bytes} bytes")
        if value.home is not None and value.producer:
            raise GraphError(
                f"value {value.name} has a home on the {value.home} and is made by op "
                f"{value.producer}: only what is there before the step begins has a home"
            )
    _check_ops(graph, values)
    _check_producers(graph)
    _check_outputs(graph, values)
    _check_sums(graph)


def _check_ops(graph: TrainingGraph, values: dict[str, Value]) -> None:
    present = {value.name for value in graph.values if not value.producer}
    backward_seen = False
    for op in graph.ops:
        if op.phase == "forward" and backward_seen:
            raise GraphError(f"forward op {op.name} comes after a backward op")
        backward_seen = backward_seen or op.phase == "backward"
        _check_op(op, values, present)
        present.update(op.outputs)


def _check_op(op: Op, values: dict[str, Value], present: set[str]) -> None:
    if not 0 <= op.cost_us < math.inf or op.workspace_bytes < 0:
        raise GraphError(
            f"op {op.name} has a negative or undefined price: "
            f"{op.cost_us} us, {op.workspace_bytes} bytes of workspace; both are finite, from 0 on"
        )
    for name in op.inputs:
        if name not in values:
            raise GraphError(f"op {op.name} reads {name}, which is no value of the graph")
        if name not in present:
            raise GraphError(
                f"op {op.name} reads {name} before any op has produced it: "
                "the order is not one in which the ops can run, or the graph has a cycle"
            )
    _check_host(op)
    for name in op.outputs:
        if name not in values or values[name].producer != op.name:
            raise GraphError(
                f"op {op.name} lists output {name}, which does not name it as producer"
            )
    if len(set(op.outputs)) < len(op.outputs):
        twice = next(name for name in op.outputs if op.outputs.count(name) > 1)
        raise GraphError(f"op {op.name} lists output {twice} twice: list each value once")


def _check_host(op: Op) -> None:
    """Its price on the host is one, and it rewrites only what it reads."""
    if op.host_cost_us is not None and not 0 <= op.host_cost_us < math.inf:
        raise GraphError(
            f"op {op.name} has a negative or undefined price on the host: {op.host_cost_us} us; it "
            "is finite, from 0 on, or None where the op cannot run there"
        )
    for name in op.updates:
        if name not in op.inputs:
            raise GraphError(
                f"op {op.name} updates {name} and does not read it: list it among its inputs"
            )


def _check_producers(graph: TrainingGraph) -> None:
    """Each value with a producer is an output of that op."""
    made = {name for op in graph.ops for name in op.outputs}
    for value in graph.values:
        if not value.producer or value.name in made:
            continue
        if any(op.name == value.producer for op in graph.ops):
            raise GraphError(
                f"value {value.name} names op {value.producer} as its producer, which does not "
                "list it: add it to the outputs of the op"
            )
        raise GraphError(
            f"value {value.name} is produced by {value.producer}, which is no op of the graph: "
            "leave the producer empty for what is resident"
        )


def _check_outputs(graph: TrainingGraph, values: dict[str, Value]) -> None:
    """Outputs exist, and those of forward are made in forward."""
    for name in (*graph.forward_outputs, *graph.outputs):
        if name not in values:
            raise GraphError(f"output {name} is produced by no op")
    late = {op.name for op in graph.ops if op.phase == "backward"}
    for name in graph.forward_outputs:
        if values[name].producer in late:
            raise GraphError(
                f"output {name} of forward is produced by {values[name].producer}, a backward "
                "op: list it among the outputs of the step instead"
            )


def _check_sums(graph: TrainingGraph) -> None:
    """Resident bytes are not negative; sums of bytes and of costs are not too large."""
    resident = msgspec.structs.asdict(graph.resident)
    for category, size_bytes in resident.items():
        if size_bytes < 0:
            raise GraphError(f"resident {category} are negative: {size_bytes}; give 0 for none")
    total_bytes = sum(resident.values()) + sum(value.size_bytes for value in graph.values)
    total_bytes += sum(op.workspace_bytes for op in graph.ops)
    if total_bytes >= MOST_BYTES:
        raise GraphError(
            f"values, workspaces and what is resident are {total_bytes} bytes in all, beyond "
            f"what can be computed with, {MOST_BYTES}: are the sizes in bytes?"
        )
    total_us = sum(op.cost_us for op in graph.ops)
    if total_us > MOST_US:
        raise GraphError(
            f"the costs of all ops are {total_us} us in all, beyond what can be computed with, "
            f"{MOST_US}: are they in microseconds?"
        )
