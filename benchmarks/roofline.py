"""Prices from a stated machine: the same graph has the same prices wherever it is captured.

An op takes the longer of its arithmetic and its traffic, and a launch:
``max(flops / rate, bytes / bandwidth) + launch``. The rates are those of an A100 as it is
seen to run, not as it is sold. Flops are counted by `torch.utils.flop_counter`, and are zero
for ops that it does not know, which are bound by their traffic. No op has workspace.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
from torch import fx
from torch.utils import flop_counter

from remat.graph_capture.graph import Op, TrainingGraph
from remat.graph_capture.joint import TANGENTS
from remat.graph_capture.node_facts import target_name, tensors_of
from remat.graph_capture.tracing import Trace

_COUNTS = cast("Any", flop_counter)

FLOPS_PER_US = 150e6
"""150 Tflop/s."""
BYTES_PER_US = 1.3e6
"""1.3 TB/s."""
LAUNCH_US = 3.0
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


def roofline(trace: Trace) -> TrainingGraph:
    """The trace's graph, each op priced by its flops and the bytes it moves."""
    nodes = trace.joint.node_of_op
    ops = tuple(_priced(op, nodes.get(op.name)) for op in trace.graph.ops)
    return msgspec.structs.replace(trace.graph, ops=ops, device="roofline", prices="roofline")


def _priced(op: Op, node: fx.Node | None) -> Op:
    if op.target == TANGENTS:
        return op
    work_us = 0.0
    if node is not None:
        work_us = max(flops_of(node) / FLOPS_PER_US, moved_bytes(node) / BYTES_PER_US)
    return msgspec.structs.replace(op, cost_us=LAUNCH_US + work_us)


def moved_bytes(node: fx.Node) -> int:
    """Bytes of the node's arguments and results; of an expanded tensor, those it has."""
    tensors = [t for n in (*node.all_input_nodes, node) for t in tensors_of(n) if t is not None]
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def flops_of(node: fx.Node) -> int:
    """Floating-point operations of one run; 0 where torch does not count them."""
    args: list[Any] = [_value(arg) for arg in node.args]
    name = target_name(node)
    if name == ATTENTION:
        return _COUNTS.sdpa_flop_count(*(t.shape for t in args[:3]))
    if name == ATTENTION_BACKWARD:
        return _COUNTS.sdpa_backward_flop_count(*(t.shape for t in args[:4]))
    formula = _COUNTS.flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    kwargs = {key: _value(arg) for key, arg in node.kwargs.items()}
    return int(formula(*args, **kwargs, out_val=_value(node)))


def _value(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        return argument.meta.get("val")
    if isinstance(argument, (list, tuple)):
        return [_value(item) for item in cast("list[Any]", argument)]
    return argument
