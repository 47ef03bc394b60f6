"""Traces of the tests' models, and their graphs at one cost."""

from __future__ import annotations

import msgspec

from remat.graph_capture import trace
from remat.graph_capture.graph import TANGENTS, TrainingGraph
from remat.graph_capture.tracing.traced_step import Trace
from tests.models import make


def traced(name: str) -> Trace:
    """The trace of the model of that name."""
    model, args, kwargs, loss_fn, target = make(name)
    return trace(model, args, kwargs, loss_fn=loss_fn, target=target)


def at_100_us(graph: TrainingGraph) -> TrainingGraph:
    """`graph` with each op at 100 us, but for the arrival of tangents."""
    ops = tuple(
        msgspec.structs.replace(op, cost_us=0.0 if op.target == TANGENTS else 100.0)
        for op in graph.ops
    )
    return msgspec.structs.replace(graph, ops=ops)
