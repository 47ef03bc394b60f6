"""Calls in Inductor's code as fx nodes, with the strides that their arguments really have."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor

from remat.rewriter.inductor.subgraphs import subgraphs


def as_laid_out(kernel: Any) -> fx.Node | None:
    """The fx node behind a kernel, with the strides that its tensor arguments really have."""
    origin = _origin(kernel)
    if origin is None:
        return None
    given = pytree.tree_leaves((origin.args, origin.kwargs))
    tensors = [leaf for leaf in given if isinstance(leaf, fx.Node)]
    real = list(kernel.inputs)
    graph = fx.Graph()
    stand_in: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(tensors):
        if node not in stand_in:
            stand_in[node] = graph.placeholder(f"arg{len(stand_in)}_1")
            layout = real[i].maybe_get_layout() if len(real) == len(tensors) else None
            stand_in[node].meta["val"] = _laid_out(node.meta.get("val"), layout)
    args, kwargs = pytree.tree_map(
        lambda leaf: stand_in[leaf] if isinstance(leaf, fx.Node) else leaf,
        (tuple(origin.args), dict(origin.kwargs)),
    )
    made = graph.create_node("call_function", origin.target, args, kwargs)
    made.meta["val"] = origin.meta.get("val")
    return made


def _origin(kernel: Any) -> fx.Node | None:
    """The node that a kernel was made for."""
    own = _inside(kernel.get_origin_node(), kernel.op_overload)
    if own is not None and own.op == "call_function" and own.target == kernel.op_overload:
        return own
    same = [node for node in kernel.origins if node.target == kernel.op_overload]
    if own is None and len(same) != 1:
        return None
    return own if own is not None and own.op == "call_function" else same[0]


def _inside(node: fx.Node | None, target: Any) -> fx.Node | None:
    """The call of `target` in a graph that the node runs, as Inductor puts ops whose order counts.

    Other nodes as they are.
    """
    if node is None or not isinstance(node.target, HigherOrderOperator):
        return node
    called = [call for graph in subgraphs(node) for call in graph.nodes if call.target == target]
    return called[0] if len(called) == 1 else None


def _laid_out(like: Any, layout: Any) -> Any:
    """`like` with the strides of `layout`, if its shape is the same."""
    if not isinstance(like, FakeTensor) or layout is None:
        return like
    size, stride = [int(n) for n in layout.size], [int(n) for n in layout.stride]
    if size != list(like.shape) or stride == list(like.stride()):
        return like
    with like.fake_mode:
        return torch.empty_strided(size, stride, dtype=like.dtype, device=like.device)
