"""Whether torch's own cut of a joint graph computes the step's gradients.

It does not look at what an input holds when backward reads it again, nor at whether an op that it
computes again does the same a second time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.utils._pytree as pytree
from torch import fx

from remat.graph_capture.joint.nodes import draws_randomness, is_custom
from remat.rewriter.inductor.nodes import SEEDS, is_view


def is_right(
    forward: fx.GraphModule, backward: fx.GraphModule, n_outputs: int, overwritten: Iterable[str]
) -> bool:
    """Whether backward reads no overwritten input, and runs nothing again that must run once.

    Parameters
    ----------
    n_outputs : how many results of forward are not saved for backward.
    overwritten : names of the inputs that the step overwrites.
    """
    once = {node.name for node in forward.graph.nodes if _runs_once(node)}
    again = any(_runs_once(node) and node.name in once for node in backward.graph.nodes)
    saved = pytree.tree_leaves(forward.graph.output_node().args[0])[n_outputs:]
    read = {_viewed(node).name for node in saved if isinstance(node, fx.Node)}
    return not again and read.isdisjoint(overwritten)


def _runs_once(node: fx.Node) -> bool:
    return node.target == SEEDS or draws_randomness(node) or is_custom(node)


def _viewed(node: fx.Node) -> fx.Node:
    """What a node is a view of."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node
