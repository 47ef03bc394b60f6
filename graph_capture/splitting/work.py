"""What our ops do in place of captured ones, for prices on a device that is not here."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from remat.graph_capture.splitting.head_gradients import cuts_classes_out_of_rows
from remat.graph_capture.splitting.heads import Head
from remat.graph_capture.splitting.kinds import Part
from remat.graph_capture.splitting.linear_cross_entropy import FORWARD, SMOOTHED, WEIGHT
from remat.graph_capture.splitting.mlp_ops import MLP, MLP_GATED_INPUT, MLP_INPUT, MLP_WEIGHTS
from remat.graph_capture.splitting.replaced_mlp import results_of

BLOCKS: dict[Any, int] = {MLP: 2, MLP_INPUT: 3, MLP_WEIGHTS: 3}
"""Blocks of hidden tensors that an op has live: in forward what goes into the function and its
result; in backward what went into it and two gradients."""
BLOCKS_GATED: dict[Any, int] = {MLP: 3, MLP_GATED_INPUT: 4, MLP_WEIGHTS: 5}
"""The same with a gate: what up returns is one more, and the product's gradient another."""


def captured_ops(part: Part, node: fx.Node, pieces: int) -> list[fx.Node]:
    """The nodes whose work an op of ours does: backward makes what is hidden again."""
    if isinstance(part, Head):
        return _nodes_of_head(part, node, pieces)
    if node.target is MLP:
        return part.forward
    own = [one for one in results_of(part, node.target) if one is not None]
    hidden = [one for one in (*part.forward, *part.backward) if one not in part.ends]
    return [*hidden, *own]


def workspace_bytes(part: Part, node: fx.Node, pieces: int) -> int:
    """The most bytes that one piece has live."""
    if isinstance(part, Head):
        return _head_workspace_bytes(part, node, pieces)
    value: Tensor = part.gate.product.meta["val"]
    n_blocks = (BLOCKS if part.up is None else BLOCKS_GATED)[node.target]
    return n_blocks * -(-value.nbytes // pieces)


def _nodes_of_head(head: Head, node: fx.Node, pieces: int) -> list[fx.Node]:
    """The nodes whose work an op of ours does: backward makes the logits again.

    Where blocks of classes are cut out of rows, it makes them again for each.
    """
    if node.target in (FORWARD, SMOOTHED):
        return head.forward
    ends = (head.of_x, head.of_weight, head.of_bias)
    made = {node.name, *(user.name for user in node.users)}
    own = [one for one in ends if one is not None and one.name in made]
    logits = [one for one in head.forward if one is not head.loss]
    shared = [one for one in head.backward if one not in ends]
    return [*(logits + shared) * (pieces if _is_cut_out_of_rows(head, node) else 1), *own]


def _is_cut_out_of_rows(head: Head, node: fx.Node) -> bool:
    dtype = head.softmax.meta["val"].dtype
    return node.target is WEIGHT and cuts_classes_out_of_rows(dtype, head.smoothing)


def _head_workspace_bytes(head: Head, node: fx.Node, pieces: int) -> int:
    """The most bytes that one piece has live: three blocks in the dtype of the loss.

    They are, in backward, the logarithms of the probabilities, their gradient and that of the
    logits; in forward it is less. A block of classes that is cut out of rows is one more.
    """
    value, of_x = head.softmax.meta["val"], head.product.meta["val"]
    blocks_bytes = 3 * (-(-value.numel() // pieces)) * value.element_size()
    if not _is_cut_out_of_rows(head, node):
        return blocks_bytes
    return blocks_bytes + -(-of_x.numel() // pieces) * of_x.element_size()
