"""Gradients that autograd would copy are copied inside the step.

Autograd keeps a gradient only if nothing else holds it, as where two parameters are added up and so
have the same, and if it is laid out as the parameter is (`AccumulateGrad`, the "gradient layout
contract"). It copies it otherwise. Eager copies each as soon as backward has made it. A compiled
step hands over all gradients at its end, so that copies would come on top of the peak. Here the
copy is an op of the step, right after the gradient. What a copy does not free is copied where eager
copies it: after all that the formula of one op of forward makes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.joint.eager_memory import MADE_AS
from remat.graph_capture.joint.nodes import is_tangent, is_view, storage_key
from remat.graph_capture.joint.phases import MADE_IN_FORWARD

_library = torch.library.Library("remat", "FRAGMENT")
_library.define("laid_out(Tensor x, int[] strides) -> Tensor")


@torch.library.impl(_library, "laid_out", "CompositeExplicitAutograd")
def laid_out(x: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy of `x` with those strides."""
    return x.new_empty_strided(x.shape, strides).copy_(x)


LAID_OUT = torch.ops.remat.laid_out.default


def lay_out_gradients(
    gm: fx.GraphModule, num_forward_outputs: int, handed_over: Collection[int] = ()
) -> None:
    """Copy the gradients of parameters in a joint graph that autograd would copy.

    Parameters
    ----------
    handed_over : places of gradients that autograd adds to others, and copies itself if it must.
    """
    end = gm.graph.output_node()
    given: Any = end.args[0]
    results = list(given)
    inputs = gm.graph.find_nodes(op="placeholder")
    parameter = {
        node.meta["desc"]: node
        for node in inputs
        if type(node.meta.get("desc")).__name__ == "ParamAOTInput"
    }
    taken = {
        storage_key(node.meta["val"])
        for node in inputs
        if _is_strided(node.meta.get("val")) and not is_tangent(node)
    }
    for i in range(num_forward_outputs, len(results)):
        node, what = results[i], end.meta["desc"][i]
        like = parameter.get(getattr(what, "grad_of", None))
        is_own = i - num_forward_outputs not in handed_over and isinstance(node, fx.Node)
        if not is_own or like is None or not _is_strided(node.meta["val"]):
            continue  # others are refused elsewhere
        key = storage_key(node.meta["val"])
        if key in taken or not _autograd_keeps(node.meta["val"], like.meta["val"]):
            results[i] = _laid_out_copy(gm, node, like)
        taken.add(key)
    if results != list(given):
        end.args = (tuple(results),)
        gm.recompile()


def _is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _autograd_keeps(gradient: Tensor, parameter: Tensor) -> bool:
    """Whether autograd keeps a gradient of such strides."""
    strides = zip(gradient.shape, gradient.stride(), _strides_for(parameter), strict=True)
    return all(size == 1 or own == wanted for size, own, wanted in strides)


def _strides_for(parameter: Tensor) -> Sequence[int]:
    """Strides that autograd keeps: the parameter's, or contiguous ones if these have gaps."""
    if torch.ops.aten.is_non_overlapping_and_dense.default(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def _laid_out_copy(gm: fx.GraphModule, node: fx.Node, parameter: fx.Node) -> fx.Node:
    value, strides = node.meta["val"], _strides_for(parameter.meta["val"])
    last = _before_copy(node, parameter)
    with gm.graph.inserting_after(last):
        copy = gm.graph.call_function(LAID_OUT, (node, list(strides)))
    copy.meta = {**node.meta, "val": value.new_empty_strided(value.shape, strides)}
    copy.meta.pop(MADE_IN_FORWARD, None)  # autograd copies it in backward, whoever made it
    if MADE_AS in last.meta:  # what eager lets go of before the next node is gone when it copies
        copy.meta[MADE_AS] = last.meta[MADE_AS] + 1
    return copy


def _before_copy(gradient: fx.Node, parameter: fx.Node) -> fx.Node:
    """The node after which a gradient is copied: itself, if the copy frees what it is a copy of.

    Else it is the last one that autograd makes before eager copies: right after the backward of
    the op that reads the parameter. Ops of forward are numbered, and autograd goes down.
    """
    source = gradient
    while is_view(source):
        source = source.all_input_nodes[0]
    if not is_tangent(source) and len(source.users) < 2:
        return gradient
    read_at = min(
        (n for user in parameter.users if (n := _sequence_of(user)) is not None), default=0
    )
    last = gradient
    while last.next.op == "call_function" and (_sequence_of(last.next) or 0) >= read_at > 0:
        last = last.next
    return last


def _sequence_of(node: fx.Node) -> int | None:
    """Of the op of forward that the node stands for, or whose backward made it."""
    return node.meta.get("seq_nr")
