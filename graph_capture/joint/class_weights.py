"""The weights of classes under label smoothing, summed in eager's order.

A mean with label smoothing divides by the sum of the weights of all targets. Eager picks the
targets that count and sums their weights. A trace cannot know how many there are, so torch sums
zeros for the others among them, which rounds otherwise (`cross_entropy_loss_label_smoothing` in
torch's `LossNLL.cpp`). The node is changed here to an op that sums as eager does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.joint.nodes import erase_unread

aten = torch.ops.aten

_SAME_NUMBERS = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default,
)  # fmt: skip

_library = torch.library.Library("remat", "FRAGMENT")
_library.define("sum_of_class_weights(Tensor weight, Tensor target, int ignore_index) -> Tensor")


@torch.library.impl(_library, "sum_of_class_weights", "CompositeExplicitAutograd")
def sum_of_class_weights(weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The sum of the weights of those targets that are not ignored."""
    return weight.gather(0, target.masked_select(target != ignore_index)).sum()


@torch.library.impl(_library, "sum_of_class_weights", "Meta")
def _of_no_dimension(weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    return weight.new_empty(())


def make_class_weights_exact(gm: fx.GraphModule) -> None:
    """Change the sums of class weights of a joint graph to eager's."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.sum.default):
        facts = _summed_weights(node)
        if facts is not None:
            read = node.all_input_nodes
            node.target, node.args = torch.ops.remat.sum_of_class_weights.default, facts
            erase_unread(*read)


def _summed_weights(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """Weights, targets and the ignored one, where a node sums the weights of all targets."""
    counted = _called(node.args[0], aten.masked_fill.Scalar)
    picked = _called(counted.args[0], aten.gather.default) if counted else None
    safe = _called(picked.args[2], aten.masked_fill.Scalar) if picked else None
    if counted is None or picked is None or safe is None or len(node.args) > 1 or node.kwargs:
        return None
    is_ignored = _called(safe.args[1], aten.eq.Scalar)
    facts: Any = picked.args[0], safe.args[0], is_ignored.args[1] if is_ignored else None
    is_same = is_ignored is not None and is_ignored.args[0] is safe.args[0]
    is_same = is_same and _called(counted.args[1], aten.eq.Scalar) is is_ignored
    is_filled = counted.args[2] == safe.args[2] == picked.args[1] == 0
    return facts if is_same and is_filled else None


def _called(node: Any, target: Any) -> fx.Node | None:
    """The node, behind changes of its shape, if it calls `target`."""
    while isinstance(node, fx.Node) and node.target in _SAME_NUMBERS:
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.target is target else None
