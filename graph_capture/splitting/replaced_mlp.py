"""Puts our ops in the place of an MLP in a joint graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.splitting.mlp_ops import MLP, MLP_GATED_INPUT, MLP_INPUT, MLP_WEIGHTS
from remat.graph_capture.splitting.mlps import Mlp
from remat.graph_capture.splitting.placing import erase_left, take_place, take_places


def replace_mlp(mlp: Mlp, pieces: int) -> list[fx.Node]:
    """Put ops that run in `pieces` in the place of `mlp`; returns them, forward first."""
    up_weight, up_bias = (mlp.up.weight, mlp.up.bias) if mlp.up else (None, None)
    gate, down = mlp.gate, mlp.down
    read = gate.x, gate.weight, gate.bias, up_weight, up_bias, down.weight
    graph = down.product.graph
    # A part that was replaced before has left others in the places of these, under their names.
    standing = {node.name: node for node in graph.nodes}
    read = tuple(node and standing[node.name] for node in read)
    gradient = standing[mlp.gradient.name]
    made = [_node_before(down.product, MLP, mlp.name, (*read, down.bias, mlp.activation, pieces))]
    made[0].meta = dict(down.product.meta)
    take_place(down.product, made[0])
    ends = [*mlp.of_gate.all(), *mlp.of_up.all(), *mlp.of_down.all()]
    order = {node: i for i, node in enumerate(graph.nodes)}
    first = min(ends, key=order.__getitem__)
    # The input's gradient comes first: it reads the weights, whose updates wait for it.
    given = (gradient, *read, mlp.activation)
    made += [
        _node_before(first, op, f"{made[0].name}_{name}", (*given, *more, pieces))
        for op, name, more in _ops_of_backward(mlp)
    ]
    for node in made[1:]:
        _take_places(mlp, node)
    erase_left(graph, reversed([*mlp.forward, *mlp.backward]))
    return made


def results_of(mlp: Mlp, op: Any) -> list[fx.Node | None]:
    """The nodes whose places the results of an op take; for a number that there is none, None."""
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
    graph = before.graph
    with graph.inserting_before(before):
        return graph.create_node("call_function", op, args, {}, name)


def _take_places(mlp: Mlp, node: fx.Node) -> None:
    old = results_of(mlp, node.target)
    wanted = [one for one in old if one is not None]
    node.meta = dict(wanted[0].meta)
    if node.target is MLP_INPUT:
        take_place(wanted[0], node)
        return
    node.meta["val"] = tuple(_values(mlp, node.target, old))
    take_places(node, old)


def _values(mlp: Mlp, op: Any, old: Sequence[fx.Node | None]) -> list[Tensor]:
    """The traced values of results: those in whose place they are.

    A gradient that nobody needs has no elements if it is of a weight, and those of x if it is one
    of its terms.
    """
    like: Tensor = mlp.gate.weight.meta["val"] if op is MLP_WEIGHTS else mlp.gate.x.meta["val"]
    with like.fake_mode:  # pyright: ignore
        none = torch.empty(
            0 if op is MLP_WEIGHTS else like.shape, dtype=like.dtype, device=like.device
        )
    return [none if one is None else one.meta["val"] for one in old]
