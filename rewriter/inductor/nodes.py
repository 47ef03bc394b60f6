"""What Inductor makes of a node of its joint graph: a view, part of a kernel, or a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import inductor_prims

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.nodes import (
    draws_randomness,
    is_custom,
    is_getitem,
    mutates,
    storage_key,
    tensors_of,
)

aten, prims = torch.ops.aten, torch.ops.prims

SEEDS = inductor_prims.seeds
DRAWS = frozenset({inductor_prims.random, inductor_prims.randint})
"""They draw from a seed that they are given, so they draw the same when they run again.

Inductor's seeds are made in forward and saved. What draws from the stream itself runs once.
"""

_INLINED = frozenset(
    {
        aten._adaptive_avg_pool2d.default, aten.arange.start_step, aten.cat.default,
        aten.clone.default, aten.constant_pad_nd.default, aten.copy.default,
        aten.embedding.default, aten.empty.memory_format, aten.flip.default, aten.full.default,
        aten.full_like.default, aten.gather.default, aten.index.Tensor, aten.repeat.default,
        aten.select_scatter.default, aten.slice_scatter.default, aten.where.self,
        prims.convert_element_type.default, prims.iota.default,
        inductor_prims.lookup_seed, *DRAWS,
    }
)  # fmt: skip

_REDUCTIONS = frozenset(
    {
        "all", "amax", "amin", "any", "argmax", "argmin", "logsumexp", "max", "mean", "min",
        "prod", "std", "sum", "var", "var_mean",
    }
)  # fmt: skip


def is_view(node: fx.Node) -> bool:
    """Whether the node's result shares the storage of its first argument."""
    if node.op != "call_function" or mutates(node) or is_getitem(node):
        return False
    if getattr(node.target, "is_view", False):
        return True
    made = {storage_key(t) for t in tensors_of(node) if t is not None}
    given = {storage_key(t) for a in node.all_input_nodes for t in tensors_of(a) if t is not None}
    return bool(made) and made <= given


def is_inlined(node: fx.Node) -> bool:
    """Whether Inductor computes the node inside the kernels that read it."""
    if node.op != "call_function" or draws_randomness(node) or mutates(node) or is_custom(node):
        return False
    return node.target in _INLINED or torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_reduction(node: fx.Node) -> bool:
    """Whether Inductor makes one kernel of the node and what is inlined into it."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(getattr(packet, "__name__", "")) in _REDUCTIONS


def is_generated(node: fx.Node) -> bool:
    """Whether the node is computed by code that Inductor generates."""
    return is_inlined(node) or is_reduction(node) or node.target == SEEDS


def place_of(node: fx.Node) -> tuple[str, str]:
    """Module path and ``file:line`` behind a node; empty where dynamo has not noted them."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values()]
    module = paths[-1].removeprefix("L['self'].").removeprefix("L['fn'].") if paths else ""
    trace = str(node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or "")
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not lines:
        return module, ""
    file, _, rest = lines[-1].removeprefix('File "').partition('", line ')
    return module, f"{file}:{rest.split(',')[0]}"


def refuse_symbols(node: fx.Node) -> None:
    """Raise `CaptureError` if a size of what the node returns depends on data."""
    for item in (node.meta.get("val"), *tensors_of(node)):
        sizes: list[Any] = list(item.shape) if isinstance(item, Tensor) else [item]
        if any(map(_is_symbol, sizes)):
            raise CaptureError(data_dependent_message(node.name, sizes))


def data_dependent_message(name: str, sizes: Sequence[Any]) -> str:
    """Why a graph with such a node has no plan, and the way out."""
    return (
        f"{name} has a size that depends on data, {list(sizes)}, and a plan is for sizes that are "
        "known: set torch._dynamo.config.capture_dynamic_output_shape_ops and "
        "capture_scalar_outputs to False, by which the graph ends there, or use a mask instead"
    )


def _is_symbol(size: Any) -> bool:
    """Whether a size is not known. A symbol whose number a guard has fixed is known."""
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None
