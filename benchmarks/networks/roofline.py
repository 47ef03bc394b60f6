"""Costs from a stated machine: the same graph has the same costs wherever it is captured.

Such costs are for comparing solvers only; `remat.capture` measures its own. An op takes the
longer of its arithmetic and its traffic, and a launch:
``max(flops / rate, bytes / bandwidth) + launch``. The rates are those that an A100 reaches in
practice, which are below what its maker states. `torch.utils.flop_counter` counts flops. It knows
no flops of some ops; those are bound by their traffic. No op has workspace.
"""

from __future__ import annotations

import msgspec
from torch import fx

from remat.graph_capture.costs.cache import flops_of, moved_bytes
from remat.graph_capture.graph import TANGENTS, Op, TrainingGraph
from remat.graph_capture.tracing.traced_step import Trace

FLOPS_PER_US = 150e6
"""150 Tflop/s."""
BYTES_PER_US = 1.3e6
"""1.3 TB/s."""
LAUNCH_US = 3.0


def roofline(trace: Trace) -> TrainingGraph:
    """The trace's graph, each op costed by its flops and the bytes it moves."""
    nodes = trace.joint.node_of_op
    ops = tuple(_costed(op, nodes.get(op.name)) for op in trace.graph.ops)
    return msgspec.structs.replace(trace.graph, ops=ops, device="roofline", cost_origin="roofline")


def _costed(op: Op, node: fx.Node | None) -> Op:
    if op.target == TANGENTS:
        return op
    work_us = 0.0
    if node is not None:
        work_us = max(flops_of(node) / FLOPS_PER_US, moved_bytes(node) / BYTES_PER_US)
    return msgspec.structs.replace(op, cost_us=LAUNCH_US + work_us)
