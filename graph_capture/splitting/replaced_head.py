"""Puts our ops in the place of a head and its loss in a joint graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.splitting.heads import Head, loss_results
from remat.graph_capture.splitting.linear_cross_entropy import (
    FORWARD,
    INPUT,
    INPUT_AND_WEIGHT,
    SMOOTHED,
    WEIGHT,
)
from remat.graph_capture.splitting.placing import erase_left, picked, take_place, take_places


def replace_head(head: Head, pieces: int, is_exact: bool) -> list[fx.Node]:
    """Put ops that run in `pieces` in the place of `head`; returns them, forward first."""
    target, class_weight, reduction, ignore_index = head.loss.args[1:5]
    read = (head.x, head.weight, head.bias, target, class_weight)
    facts = (
        head.grid, head.start, head.stop, head.softmax.meta["val"].dtype, reduction, ignore_index,
        pieces,
    )  # fmt: skip
    made = [_forward(head, (*read, *facts))]
    saved = [picked(made[0], i, f"{head.softmax.name}_{name}") for i, name in SAVED.items()]
    row_term = head.smoothing.row_term if head.smoothing else None
    backward = (head.gradient, *read, head.total_weight, *saved, row_term, *facts)
    for op, name, gradients in _backward_ops(head, is_exact):
        made.append(_backward(head, op, f"{head.softmax.name}_{name}", backward, gradients))
    graph = head.loss.graph
    erase_left(graph, reversed([*head.forward, *head.backward]))
    return made


SAVED = {2: "top", 3: "log_sum"}
"""Results of forward that backward reads, by their place."""

Gradients = tuple[fx.Node | None, ...]


def _backward_ops(head: Head, is_exact: bool) -> list[tuple[Any, str, Gradients]]:
    """Each op of backward: its name, and the nodes whose places its results take."""
    if not is_exact and head.of_x is not None and head.of_weight is not None:
        results = (head.of_x, head.of_weight, head.of_bias)
        return [(INPUT_AND_WEIGHT, "gradients", results)]
    ops: list[tuple[Any, str, Gradients]] = []
    if head.of_x is not None:
        ops.append((INPUT, "of_input", (head.of_x,)))
    if head.of_weight is not None:
        ops.append((WEIGHT, "of_weight", (head.of_weight, head.of_bias)))
    return ops


def _forward(head: Head, args: tuple[Any, ...]) -> fx.Node:
    graph, results = head.loss.graph, loss_results(head.loss)
    with graph.inserting_before(head.loss):
        op = SMOOTHED if head.smoothing else FORWARD
        node = graph.create_node("call_function", op, args, {}, f"{head.softmax.name}_in_pieces")
    loss, total = head.loss.meta["val"]
    log_p: Tensor = head.softmax.meta["val"]
    with log_p.fake_mode:  # pyright: ignore
        a_row = [torch.empty(len(log_p), 1, dtype=log_p.dtype, device=log_p.device) for _ in SAVED]
    # Results of the loss that nobody picks have no storage of their own in the trace.
    values = [loss, total, *a_row]
    if head.smoothing:
        results[len(values)] = head.smoothing.row_sum
        values.append(head.smoothing.row_sum.meta["val"])
    node.meta = {**head.product.meta, "val": tuple(values)}
    for i, old in results.items():
        take_place(old, picked(node, i, old.name, before=head.loss))
    if head.total_weight in results.values():
        head.total_weight = next(user for user in node.users if user.args[1] == 1)
    return node


def _backward(
    head: Head, op: Any, name: str, args: tuple[Any, ...], gradients: Gradients
) -> fx.Node:
    wanted = [node for node in gradients if node is not None]
    order = {node: i for i, node in enumerate(head.loss.graph.nodes)}
    first = min(wanted, key=order.__getitem__)
    graph = first.graph
    with graph.inserting_before(first):
        node = graph.create_node("call_function", op, args, {}, name)
    node.meta = dict(first.meta)
    if op is INPUT:
        take_place(wanted[0], node)
        return node
    node.meta["val"] = tuple(_value_of(head, gradient) for gradient in gradients)
    take_places(node, gradients)
    return node


def _value_of(head: Head, gradient: fx.Node | None) -> Tensor:
    """The traced value of a result; one without elements where there is no such gradient."""
    if gradient is not None:
        return gradient.meta["val"]
    weight: Tensor = head.weight.meta["val"]
    with weight.fake_mode:  # pyright: ignore
        return torch.empty(0, dtype=weight.dtype, device=weight.device)
