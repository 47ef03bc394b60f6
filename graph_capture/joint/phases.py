"""Which nodes of a joint graph belong to forward.

A trace holds forward and backward in one graph, and says of no node where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from remat.graph_capture.joint.nodes import draws_randomness, is_tangent, tensors_of


def forward_nodes(nodes: Sequence[fx.Node], forward_results: Sequence[Any]) -> set[fx.Node]:
    """Ancestors of forward's results, and what draws or has effects there.

    A node that draws or has effects is of forward unless it descends from the tangents. All that
    neither descends from them nor leads to a result of forward is left to backward.
    """
    from_tangents = _descendants_of_tangents(nodes)
    effects = [
        node
        for node in nodes
        if node.op == "call_function"
        and node not in from_tangents
        and (draws_randomness(node) or not any(t is not None for t in tensors_of(node)))
    ]
    found: set[fx.Node] = set()
    stack = [n for n in forward_results if isinstance(n, fx.Node)] + effects
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _descendants_of_tangents(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found = {node for node in nodes if is_tangent(node)}
    for node in nodes:
        if node.op == "call_function" and any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found
