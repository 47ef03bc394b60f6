"""The work of an op: its arithmetic and its traffic, from shapes alone.

It is the same on every device, so a profile of one device can fit a model of another.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec
import torch
from torch import fx
from torch.utils import flop_counter

from remat.graph_capture.in_place.as_one import STEP_METAS, AsOne
from remat.graph_capture.joint.nodes import argument, target_name, tensors_of

ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
FUSED_ATTENTION = "aten._scaled_dot_product_"
"""How the names of all fused attention ops begin."""

_COUNTS = cast("Any", flop_counter)

WorkKind = Literal["matmul", "convolution", "attention", "other"]


class Work(msgspec.Struct, frozen=True):
    """What one run of an op takes.

    Attributes
    ----------
    kind : class of ops, as efficiencies are stated for them. dtype : of its first tensor in
        floating point, else ``float32``. flops : 0 where torch does not count them.
    moved_bytes : of its arguments and results.
    """

    kind: WorkKind = "other"
    dtype: str = "float32"
    flops: int = 0
    moved_bytes: int = 0


def work_of(node: fx.Node) -> Work:
    """The work of a traced node."""
    kind = _kind_of(target_name(node))
    flops = flops_of(node)
    # torch counts all of causal attention; its kernels skip the half above the diagonal.
    if kind == "attention" and argument(node, "is_causal"):
        flops //= 2
    return Work(kind, _dtype_of(node), flops, moved_bytes(node))


def _kind_of(target: str) -> WorkKind:
    if target.startswith(FUSED_ATTENTION):
        return "attention"
    if target.startswith("aten.convolution"):
        return "convolution"
    is_matmul = target.split(".")[1:2] in (["mm"], ["addmm"], ["bmm"], ["baddbmm"])
    return "matmul" if is_matmul else "other"


def _dtype_of(node: fx.Node) -> str:
    tensors = [t for n in (*node.all_input_nodes, node) for t in tensors_of(n) if t is not None]
    dtypes = (str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point())
    return next(dtypes, "float32")


def moved_bytes(node: fx.Node) -> int:
    """Bytes of the node's arguments and results; of an expanded tensor, those of its storage.

    What it makes and then changes in place, number by number, is read and written once more.
    """
    tensors = [t for n in (*node.all_input_nodes, node) for t in tensors_of(n) if t is not None]
    tensors += 2 * [meta["val"] for meta in _changed_in_place(node)]
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def _changed_in_place(node: fx.Node) -> list[dict[str, Any]]:
    """The metas of those of the ops that run as one which do so."""
    if not isinstance(node.target, AsOne):
        return []
    steps = zip(node.target.steps, node.meta[STEP_METAS], strict=True)
    return [m for one, m in steps if one.in_place and torch.Tag.pointwise in one.op.tags]


def flops_of(node: fx.Node) -> int:
    """Floating-point operations of one run; 0 where torch does not count them."""
    args: list[Any] = [_traced_value(arg) for arg in node.args]
    name = target_name(node)
    if name.startswith(FUSED_ATTENTION):
        return _flops_of_attention(args, is_backward="backward" in name)
    formula = _COUNTS.flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    kwargs = {key: _traced_value(arg) for key, arg in node.kwargs.items()}
    return int(formula(*args, **kwargs, out_val=_traced_value(node)))


def _flops_of_attention(args: list[Any], *, is_backward: bool) -> int:
    """Torch's formula for CUDA's ops, for all: each head of keys is read by all its queries.

    Torch 2.11's takes as many heads of keys as of queries alone.
    """
    shapes = [tuple(t.shape) for t in args[: 4 if is_backward else 3]]
    *first, query, key, value = shapes
    key, value = ((*query[:-2], *of_all[-2:]) for of_all in (key, value))
    if is_backward:
        return _COUNTS.sdpa_backward_flop_count(*first, query, key, value)
    return _COUNTS.sdpa_flop_count(query, key, value)


def _traced_value(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        return argument.meta.get("val")
    if isinstance(argument, (list, tuple)):
        return [_traced_value(item) for item in cast("list[Any]", argument)]
    return argument
