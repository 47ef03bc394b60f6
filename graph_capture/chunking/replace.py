"""Puts ops that run in chunks in the places of heads with their losses, and of MLPs."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from remat.graph_capture.chunking.head import Head, find_heads, loss_results
from remat.graph_capture.chunking.head_ops import FORWARD, INPUT, INPUT_AND_WEIGHT, SMOOTHED, WEIGHT
from remat.graph_capture.chunking.mlp import Mlp, find_mlps
from remat.graph_capture.chunking.mlp_ops import MLP, MLP_GATED_INPUT, MLP_INPUT, MLP_WEIGHTS
from remat.graph_capture.errors import ScheduleError


def picked(node: fx.Node, i: int, name: str, before: fx.Node | None = None) -> fx.Node:
    graph = node.graph
    with graph.inserting_before(before) if before is not None else graph.inserting_after(node):
        made = graph.create_node("call_function", operator.getitem, (node, i), {}, name)
    made.meta = {**node.meta, "val": node.meta["val"][i]}
    return made


def _replace_node(old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    name, meta = old.name, old.meta  # under its name, the rest of the graph stays as it is
    old.graph.erase_node(old)
    new.name = name
    if new.target is operator.getitem:  # an op of ours has its own meta already
        new.meta = dict(meta)


def _take_places(node: fx.Node, old: Sequence[fx.Node | None], like: Tensor, none: Any) -> None:
    """Let results of `node` take the places of `old`, in their order; None, of shape `none`, has
    no place."""
    if node.target in (INPUT, MLP_INPUT):  # one result
        _replace_node(cast("fx.Node", old[0]), node)
        return
    with like.fake_mode:  # pyright: ignore
        unwanted = torch.empty(none, dtype=like.dtype, device=like.device)
    node.meta["val"] = tuple(unwanted if one is None else one.meta["val"] for one in old)
    last = node
    for i, one in enumerate(old):
        if one is not None:
            # One of them may be what stands next, and goes as its place is taken.
            last = picked(node, i, one.name, before=last.next)
            _replace_node(one, last)


def _erase_unread_nodes(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    left = set(graph.nodes)  # those whose places were taken are gone
    for node in nodes:
        if node in left and not node.users:
            graph.erase_node(node)


def _replace_head(head: Head, chunks: int, is_exact: bool) -> list[fx.Node]:
    target, class_weight, reduction, ignore_index = head.loss.args[1:5]
    read = (head.x, head.weight, head.bias, target, class_weight)
    dtype = head.softmax.meta["val"].dtype
    facts = (head.grid, head.start, head.stop, dtype, reduction, ignore_index, chunks)
    made = [_forward(head, (*read, *facts))]
    saved = [picked(made[0], i, f"{head.softmax.name}_{name}") for i, name in _SAVED.items()]
    row_term = head.smoothing.row_term if head.smoothing else None
    backward = (head.gradient, *read, head.total_weight, *saved, row_term, *facts)
    for op, name, gradients in _backward_ops(head, is_exact):
        first = _first_of([node for node in gradients if node is not None])
        made.append(_node_before(first, op, f"{head.softmax.name}_{name}", backward))
        made[-1].meta = dict(first.meta)
        _take_places(made[-1], gradients, head.weight.meta["val"], 0)
    _erase_unread_nodes(head.loss.graph, reversed([*head.forward, *head.backward]))
    return made


_SAVED = {2: "top", 3: "log_sum"}  # results of forward that backward reads, by their place

_Gradients = tuple[fx.Node | None, ...]


def _backward_ops(head: Head, is_exact: bool) -> list[tuple[Any, str, _Gradients]]:
    if not is_exact and head.of_x is not None and head.of_weight is not None:
        results = (head.of_x, head.of_weight, head.of_bias)
        return [(INPUT_AND_WEIGHT, "gradients", results)]  # the logits are made once less
    ops: list[tuple[Any, str, _Gradients]] = []
    if head.of_x is not None:
        ops.append((INPUT, "of_input", (head.of_x,)))
    if head.of_weight is not None:
        ops.append((WEIGHT, "of_weight", (head.of_weight, head.of_bias)))
    return ops


def _forward(head: Head, args: tuple[Any, ...]) -> fx.Node:
    results = loss_results(head.loss)
    op = SMOOTHED if head.smoothing else FORWARD
    node = _node_before(head.loss, op, f"{head.softmax.name}_in_pieces", args)
    loss, total = head.loss.meta["val"]
    log_p: Tensor = head.softmax.meta["val"]
    with log_p.fake_mode:  # pyright: ignore
        a_row = [torch.empty(len(log_p), 1, dtype=log_p.dtype, device=log_p.device) for _ in _SAVED]
    values = [loss, total, *a_row]  # results that nobody picks have no storage in the trace
    if head.smoothing:
        results[len(values)] = head.smoothing.row_sum
        values.append(head.smoothing.row_sum.meta["val"])
    node.meta = {**head.product.meta, "val": tuple(values)}
    for i, old in results.items():
        _replace_node(old, picked(node, i, old.name, before=head.loss))
    if head.total_weight in results.values():
        # Its node is erased, and the ops of backward still have to read it.
        head.total_weight = next(user for user in node.users if user.args[1] == 1)
    return node


def _first_of(nodes: Sequence[fx.Node]) -> fx.Node:
    order = {node: i for i, node in enumerate(nodes[0].graph.nodes)}
    return min(nodes, key=order.__getitem__)


def _replace_mlp(mlp: Mlp, chunks: int) -> list[fx.Node]:
    up_weight, up_bias = (mlp.up.weight, mlp.up.bias) if mlp.up else (None, None)
    gate, down = mlp.gate, mlp.down
    read = gate.x, gate.weight, gate.bias, up_weight, up_bias, down.weight
    graph = down.product.graph
    standing = {node.name: node for node in graph.nodes}  # an earlier part may have left others
    read = tuple(node and standing[node.name] for node in read)
    gradient = standing[mlp.gradient.name]
    made = [_node_before(down.product, MLP, mlp.name, (*read, down.bias, mlp.activation, chunks))]
    made[0].meta = dict(down.product.meta)
    _replace_node(down.product, made[0])
    first = _first_of([*mlp.of_gate.all(), *mlp.of_up.all(), *mlp.of_down.all()])
    given = (gradient, *read, mlp.activation)  # the input's first: weights before their updates
    made += [
        _node_before(first, op, f"{made[0].name}_{name}", (*given, *more, chunks))
        for op, name, more in _ops_of_backward(mlp)
    ]
    for node in made[1:]:
        old = results_of(mlp, node.target)
        node.meta = dict(next(one for one in old if one is not None).meta)
        is_left_out = node.target is MLP_WEIGHTS  # what nobody needs (`wanted`); no term of x's
        like: Tensor = (gate.weight if is_left_out else gate.x).meta["val"]
        _take_places(node, old, like, 0 if is_left_out else like.shape)
    _erase_unread_nodes(graph, reversed([*mlp.forward, *mlp.backward]))
    return made


def results_of(mlp: Mlp, op: Any) -> list[fx.Node | None]:
    """The nodes whose places the results of an op take; None where a result is not needed."""
    if op is MLP_WEIGHTS:
        gate, up = mlp.of_gate, mlp.of_up
        return [gate.weight, gate.bias, up.weight, up.bias, mlp.of_down.weight]
    return [mlp.of_gate.x] if op is MLP_INPUT else [mlp.of_gate.x, mlp.of_up.x]


def _ops_of_backward(mlp: Mlp) -> list[tuple[Any, str, tuple[Any, ...]]]:
    ops: list[tuple[Any, str, tuple[Any, ...]]] = []
    of_input = MLP_INPUT if mlp.up is None else MLP_GATED_INPUT
    if any(results_of(mlp, of_input)):
        ops.append((of_input, "of_input", ()))
    wanted = [node is not None for node in results_of(mlp, MLP_WEIGHTS)]
    if any(wanted):
        ops.append((MLP_WEIGHTS, "of_weights", (wanted,)))
    return ops


def _node_before(before: fx.Node, op: Any, name: str, args: tuple[Any, ...]) -> fx.Node:
    with before.graph.inserting_before(before):
        return before.graph.create_node("call_function", op, args, {}, name)


HeadOrMlp = Head | Mlp  # a part of a region, all of which run in the same number of chunks


def find_parts(graph: fx.Graph, names: Container[str] | None = None) -> list[HeadOrMlp]:
    """The parts of these names, or all; heads first. An MLP that ends in a head is none."""
    heads = find_heads(graph)[0]
    of_heads = {node for head in heads for node in (*head.forward, *head.backward)}
    mlps = [one for one in find_mlps(graph) if of_heads.isdisjoint((*one.forward, *one.backward))]
    return [one for one in (*heads, *mlps) if names is None or one.name in names]


def replace_part(part: HeadOrMlp, chunks: int, is_exact: bool) -> list[fx.Node]:
    """Put ops that run in `chunks` in the place of `part`; returns them, forward first."""
    if isinstance(part, Head):
        return _replace_head(part, chunks, is_exact)
    return _replace_mlp(part, chunks)


def chunk_parts(graph: fx.Graph, told: Iterable[tuple[str, int, bool]]) -> None:
    """Let the named parts run in so many chunks, exactly or not. Raises ScheduleError."""
    wanted = {name: (count, is_exact) for name, count, is_exact in told}
    for part in find_parts(graph, frozenset(wanted)) if wanted else []:
        replace_part(part, *wanted.pop(part.name))
    if wanted:
        raise ScheduleError(
            f"plan again: this plan runs {', '.join(wanted)} in chunks, and the step no longer "
            "has a linear head with its loss, or an MLP, of that name"
        )
