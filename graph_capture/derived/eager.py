"""The step as eager runs it, where its memory differs from that of the captured graph.

The prediction of the unmodified step is made of it. It keeps everything, also what the user's own
checkpoints make again; the step that is measured has these checkpoints. How long variables hold
values is on the values (`Value.held_until`). Not predicted: temporaries of kernels that a trace
takes apart.
"""

from __future__ import annotations

import math

import msgspec

from remat.graph_capture.graph import Op, TrainingGraph, Value

_DROPOUTS = ("aten.native_dropout.default", "remat.dropout.default")


def as_eager(graph: TrainingGraph) -> TrainingGraph:
    """`graph` with the sizes of values that the unmodified module has.

    On a CPU, eager dropout keeps a mask of the input's dtype, and a trace one of a byte an
    element. No other difference is known.
    """
    if graph.device != "cpu":
        return graph
    dropouts = [op for op in graph.ops if op.target in _DROPOUTS]
    wider = {op.outputs[1]: _mask_bytes(graph, op) for op in dropouts if len(op.outputs) > 1}
    if not wider:  # the same object, with what solvers have found out about it
        return graph

    def widened(value: Value) -> Value:
        size = wider.get(value.name, value.size_bytes)
        return msgspec.structs.replace(value, size_bytes=size)

    return msgspec.structs.replace(graph, values=tuple(widened(v) for v in graph.values))


def _mask_bytes(graph: TrainingGraph, dropout: Op) -> int:
    result, mask = (graph.value_by_name[name] for name in dropout.outputs[:2])
    return math.prod(mask.shape) * _element_bytes(result)


def _element_bytes(value: Value) -> int:
    n_elements = math.prod(value.shape)
    return value.size_bytes // n_elements if n_elements else 0
