"""Which nodes of a joint graph belong to forward.

A trace holds forward and backward in one graph. Forward marks the nodes that it has made when it
ends, and most are found again by what its results need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from remat.graph_capture.joint.nodes import draws_randomness, is_tangent, tensors_of

MADE_IN_FORWARD = "remat_made_in_forward"
"""On the meta of nodes: an autograd function's forward may compute what only backward reads."""


def mark_forward() -> None:
    """Mark the nodes of the trace that runs now: they were made by forward.

    Called as forward ends. Outside of a trace it does nothing.
    """
    mode = get_proxy_mode()
    if mode is not None:
        for node in mode.tracer.graph.nodes:
            node.meta[MADE_IN_FORWARD] = True


def forward_nodes(nodes: Sequence[fx.Node], forward_results: Sequence[Any]) -> set[fx.Node]:
    """Ancestors of forward's results, what draws or has effects there, and what forward has made.

    A node that draws or has effects is of forward unless it descends from the tangents. What
    forward has made stays where eager runs it: a loss that makes its gradient in forward, by
    chunks, frees each chunk there. All else is left to backward.
    """
    from_tangents = _descendants_of_tangents(nodes)
    effects = [
        node
        for node in nodes
        if node.op == "call_function"
        and node not in from_tangents
        and (
            MADE_IN_FORWARD in node.meta
            or draws_randomness(node)
            or not any(t is not None for t in tensors_of(node))
        )
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
