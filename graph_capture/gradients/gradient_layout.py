"""Gradients that autograd would copy are copied inside the step.

Autograd keeps a gradient only if nothing else holds it, as where two parameters are added up and so
have the same, and if it is laid out as the parameter is (`AccumulateGrad`, the "gradient layout
contract"). It copies it otherwise. Eager copies each as soon as backward has made it. A compiled
step hands over all gradients at its end, so that copies would come on top of the peak. Here the
copy is an op of the step, right after the gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.joint.nodes import is_tangent, storage_key
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
        node.meta["desc"]: node.meta["val"]
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
        if key in taken or not _autograd_keeps(node.meta["val"], like):
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


def _laid_out_copy(gm: fx.GraphModule, node: fx.Node, like: Tensor) -> fx.Node:
    value, strides = node.meta["val"], _strides_for(like)
    with gm.graph.inserting_after(node):
        copy = gm.graph.call_function(LAID_OUT, (node, list(strides)))
    copy.meta = {**node.meta, "val": value.new_empty_strided(value.shape, strides)}
    copy.meta.pop(MADE_IN_FORWARD, None)  # autograd copies it in backward, whoever made it
    return copy
