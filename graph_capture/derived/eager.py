"""The step as eager runs it, where its memory differs from that of the captured graph.

The prediction of the unmodified step is made of it. How long variables hold values is on the values
(`Value.held_until`). Not predicted: temporaries of kernels that a trace takes apart.
"""

from __future__ import annotations

import math

import msgspec

from remat.graph_capture.derived.own_checkpoints import DROPOUTS, MASK, with_own_checkpoints
from remat.graph_capture.derived.sharding import element_bytes
from remat.graph_capture.graph import WRITES_FIRST, Op, TrainingGraph, Value

AS_EAGER = "room as eager takes it"
"""Among the inputs of a graph whose sizes are those of `as_unmodified`."""


def as_eager(graph: TrainingGraph) -> TrainingGraph:
    """`graph` with the sizes of values that the unmodified module has.

    On a CPU, eager dropout keeps a mask of the input's dtype, and a trace one of a byte an
    element. Autograd adds a gradient to a view in a new tensor. No other difference is known.
    """
    values = _with_wide_masks(graph)
    ops = tuple(_summing_apart(graph, op) for op in graph.ops)
    if values == graph.values and ops == graph.ops:  # the same, with what solvers found about it
        return graph
    return msgspec.structs.replace(graph, values=values, ops=ops)


def as_unmodified(graph: TrainingGraph) -> TrainingGraph:
    """`as_eager`, for the step in which ops run when eager runs them, and no others."""
    return with_eagers_writes(as_eager(graph))


def with_eagers_writes(eager: TrainingGraph) -> TrainingGraph:
    """A graph of `as_eager`, for the step in which ops run when eager runs them.

    What eager writes over another value takes no room of its own, and holds that value. What the
    user's checkpoints cover may run again, from a state of the random stream that each keeps.
    """
    values = {value.name: value for value in eager.values}
    ops = tuple(with_own_checkpoints(eager, values))
    _write_over(eager, values)
    if tuple(values.values()) == eager.values and ops == eager.ops:
        return eager
    # Another hash, so that no schedule is replayed on the sizes of the other graph.
    return msgspec.structs.replace(
        eager, ops=ops, values=tuple(values.values()), inputs=(*eager.inputs, AS_EAGER)
    )


def _write_over(graph: TrainingGraph, values: dict[str, Value]) -> None:
    """Let the storage of what is written over be held as long as what is written there."""
    index = graph.op_index
    last_use = {name: op.name for op in graph.ops for name in (*op.inputs, *op.outputs)}
    age = {value.name: i for i, value in enumerate(graph.values)}
    for value in graph.values:
        root = value
        # A file may name what is not there, or go round in a circle.
        while age.get(root.written_over, len(age)) < age[root.name]:
            root = values[root.written_over]
        if root is value:
            continue
        values[value.name] = msgspec.structs.replace(values[value.name], size_bytes=0)
        until = [values[root.name].held_until, last_use.get(value.name, ""), value.held_until]
        last = max(until, key=lambda name: index.get(name, -1))
        if root.producer:
            values[root.name] = msgspec.structs.replace(values[root.name], held_until=last)


def _with_wide_masks(graph: TrainingGraph) -> tuple[Value, ...]:
    if graph.device != "cpu":
        return graph.values
    dropouts = [op for op in graph.ops if op.target in DROPOUTS]
    wider = {op.outputs[MASK]: _mask_bytes(graph, op) for op in dropouts if len(op.outputs) > MASK}
    return tuple(
        msgspec.structs.replace(v, size_bytes=wider[v.name]) if v.name in wider else v
        for v in graph.values
    )


def _summing_apart(graph: TrainingGraph, op: Op) -> Op:
    """An op that writes a sum where eager makes a new tensor takes as much room as that one."""
    if op.pinned != WRITES_FIRST:
        return op
    size_bytes = graph.value_by_name[op.inputs[0]].size_bytes
    return msgspec.structs.replace(op, workspace_bytes=op.workspace_bytes + size_bytes)


def _mask_bytes(graph: TrainingGraph, dropout: Op) -> int:
    result, mask = (graph.value_by_name[name] for name in dropout.outputs[:2])
    return math.prod(mask.shape) * element_bytes(result.dtype)
