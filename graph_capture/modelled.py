"""Prices for a device that is not here: a roofline of each op, by the device's stated rates.

An op takes the longer of its arithmetic and its traffic, and a launch:
``max(flops / rate, bytes / bandwidth) + launch``, at the shares of the peaks that `devices.json`
states for its class (S. Williams, A. Waterman, D. Patterson, "Roofline", 2009,
https://doi.org/10.1145/1498765.1498785). Flops are torch's own counts, halved for causal
attention; an op that torch does not count is bound by its traffic.

The graph is captured on a CPU, whose fused attention stands for the flash form of the device:
it has the same results of the same sizes. Sizes are rounded as the CUDA allocator rounds them.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, fx

from remat.graph_capture.device_table import MODELLED, Device, device_table, modelled_device
from remat.graph_capture.graph import Op, Resident, TrainingGraph, Value
from remat.graph_capture.joint import TANGENTS
from remat.graph_capture.node_facts import argument, tensors_of
from remat.graph_capture.op_work import ATTENTION, ATTENTION_BACKWARD, flops_of, moved_bytes
from remat.graph_capture.tracing import Trace

ALLOCATION_BYTES = 512
"""What the CUDA caching allocator rounds every size up to."""
RNG_STATE_BYTES = 16
ATTENTION_ROWS, ATTENTION_COLUMNS = 128, 32
"""What flash attention pads sequences and heads to in its float32 sums."""


def price_modelled(trace: Trace, name: str) -> TrainingGraph:
    """The trace's graph with the costs, workspaces and sizes of a device of the table.

    Raises
    ------
    DeviceError : there is no such device.
    """
    device = modelled_device(name)
    graph, nodes = trace.graph, trace.joint.node_of_op
    return msgspec.structs.replace(
        graph,
        ops=tuple(_priced(op, nodes.get(op.name), device) for op in graph.ops),
        values=tuple(_sized(value) for value in graph.values),
        resident=_resident(graph),
        device=name,
        prices=MODELLED,
    )


def _priced(op: Op, node: fx.Node | None, device: Device) -> Op:
    if op.target == TANGENTS:
        return op
    cost_us = device_table().launch_us
    if node is not None:
        cost_us += _work_us(node, op.target, device)
    workspace_bytes = _rounded(RNG_STATE_BYTES) if op.workspace_bytes else 0
    if node is not None and op.target == ATTENTION_BACKWARD:
        workspace_bytes += _attention_sums_bytes(node)
    return msgspec.structs.replace(op, cost_us=cost_us, workspace_bytes=workspace_bytes)


def _work_us(node: fx.Node, target: str, device: Device) -> float:
    kind = _class_of(target)
    reached = device_table().classes[kind]
    flops = flops_of(node)
    if kind == "attention" and argument(node, "is_causal"):
        flops //= 2
    arithmetic_us = flops / (reached.rate * device.flops_per_us(_rate_of(node, kind, device)))
    traffic_us = moved_bytes(node) / (reached.bandwidth * device.bytes_per_us)
    return max(arithmetic_us, traffic_us)


def _class_of(target: str) -> str:
    if target in (ATTENTION, ATTENTION_BACKWARD):
        return "attention"
    if target.startswith("aten.convolution"):
        return "convolution"
    is_matmul = target.split(".")[1:2] in (["mm"], ["addmm"], ["bmm"], ["baddbmm"])
    return "matmul" if is_matmul else "other"


def _rate_of(node: fx.Node, kind: str, device: Device) -> str:
    """The dtype whose rate the op has; float32 on tensor cores where torch is set to allow it."""
    tensors = [t for n in (*node.all_input_nodes, node) for t in tensors_of(n) if t is not None]
    dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()]
    dtype = dtypes[0] if dtypes else "float32"
    if dtype != "float32" or "tf32" not in device.tflops:
        return dtype
    is_rounded = kind == "convolution" and torch.backends.cudnn.allow_tf32
    is_rounded |= kind == "matmul" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if is_rounded else dtype


def _attention_sums_bytes(node: fx.Node) -> int:
    """Sums that flash attention's backward keeps in float32: of dq, and one an output row."""
    query = argument(node, "query")
    shown = tensors_of(query)[0] if isinstance(query, fx.Node) else None
    if not isinstance(shown, Tensor):
        return 0
    batch, heads, rows, columns = shown.shape
    rows = -(-rows // ATTENTION_ROWS) * ATTENTION_ROWS
    columns = -(-columns // ATTENTION_COLUMNS) * ATTENTION_COLUMNS
    has_own_sums = shown.dtype != torch.float32
    return _rounded(4 * batch * heads * rows * (columns * has_own_sums + 1))


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES


def _sized(value: Value) -> Value:
    size_bytes = RNG_STATE_BYTES if value.kind == "rng_state" else value.size_bytes
    return msgspec.structs.replace(value, size_bytes=_rounded(size_bytes))


def _resident(graph: TrainingGraph) -> Resident:
    """Resident bytes with each parameter, buffer and input of the step rounded up."""
    extra = dict.fromkeys(("parameter", "buffer", "constant", "input"), 0)
    for value in graph.values:
        if not value.producer and value.kind in extra:
            extra[value.kind] += _rounded(value.size_bytes) - value.size_bytes
    known = graph.resident
    return msgspec.structs.replace(
        known,
        parameters_bytes=known.parameters_bytes + extra["parameter"],
        buffers_bytes=known.buffers_bytes + extra["buffer"] + extra["constant"],
        batch_bytes=known.batch_bytes + extra["input"],
    )
