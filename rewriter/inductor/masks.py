"""Masks that backward reads, kept as bytes: Inductor's C++ writes bool an order slower than uint8.

Its C++ stores vectors of bool lane by lane, and compares vectors of bytes lane by lane. To make a
mask a float, and the float a byte, takes one instruction each. On an AVX-512 machine, comparing and
storing a mask of 524,288 elements took 6.4 ms as bool and 0.3 ms as a float made a uint8. Both take
a byte an element, and the gradients are the same.

The joint graph is changed before it is planned, so that the byte is what a plan keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from remat.rewriter.inductor.nodes import is_inlined, is_view

LEAST_ELEMENTS = 1024
"""Smaller masks stay as they are: their time does not matter."""
_CONVERT = torch.ops.prims.convert_element_type.default
_IS_SET = torch.ops.aten.ne.Scalar


def keep_masks_as_bytes(gm: fx.GraphModule, n_outputs: int) -> int:
    """Keep each mask that forward makes and backward reads as a byte, which its readers compare.

    The joint graph is changed in place. Its first `n_outputs` results are forward's. Each reader
    compares the byte, as a float, by itself: so the byte is kept, not the comparison.

    Returns
    -------
    How many masks there are.
    """
    forward = _makers(gm.graph.find_nodes(op="output")[0].args[0][:n_outputs])  # pyright: ignore
    masks = [
        node
        for node in gm.graph.nodes
        if node in forward and _is_mask(node) and _is_read_beyond(node, forward)
    ]
    for node in masks:
        _through_bytes(node)
    gm.recompile()
    return len(masks)


def _makers(results: Sequence[Any]) -> set[fx.Node]:
    """The results and all that they are made of."""
    found: set[fx.Node] = set()
    stack = [result for result in results if isinstance(result, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _is_mask(node: fx.Node) -> bool:
    tensor = node.meta.get("val")
    return (
        isinstance(tensor, Tensor)
        and tensor.dtype == torch.bool
        and tensor.device.type == "cpu"
        and tensor.numel() >= LEAST_ELEMENTS
        and is_inlined(node)
        and not is_view(node)
    )


def _is_read_beyond(node: fx.Node, forward: set[fx.Node]) -> bool:
    """Whether backward reads the node, directly or through views."""
    return any(
        _is_read_beyond(user, forward) if is_view(user) else user not in forward
        for user in node.users
    )


def _through_bytes(node: fx.Node) -> None:
    users = [user for user in node.users if user.op != "output"]
    graph = node.graph
    with graph.inserting_after(node):
        number = _made(graph, node, _CONVERT, (node, torch.float32))
    with graph.inserting_after(number):
        byte = _made(graph, node, _CONVERT, (number, torch.uint8))
    for user in users:
        with graph.inserting_before(user):
            read = _made(graph, node, _CONVERT, (byte, torch.float32))
            user.replace_input_with(node, _made(graph, node, _IS_SET, (read, 0)))


def _made(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A call with the facts of its result; its place in the user's code is that of `node`."""
    made = graph.call_function(target, args)
    made.meta = {**node.meta, "val": target(args[0].meta["val"], args[1])}
    made.meta.pop("tensor_meta", None)
    return made
