"""Random data for what a part reads, to compare it whole and in pieces."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx

from remat.graph_capture.splitting.heads import Head
from remat.graph_capture.splitting.kinds import Part
from remat.graph_capture.splitting.mlps import Mlp
from remat.graph_capture.splitting.smoothing import identity_of

IGNORED_PART = 0.1
"""Of the made targets: rows that the loss ignores."""


def made_inputs(part: Part, seed: int) -> dict[fx.Node, Tensor]:
    """Random data for what `part` reads. The user's random stream stays where it is."""
    at: Tensor = part.ends[0].meta["val"]
    with torch.random.fork_rng([at.device] if at.is_cuda else []):
        torch.manual_seed(seed)
        return _of_head(part) if isinstance(part, Head) else _of_mlp(part)


def _of_mlp(mlp: Mlp) -> dict[fx.Node, Tensor]:
    layers = (mlp.gate, mlp.down, *([mlp.up] if mlp.up else []))
    weights = (node for one in layers for node in (one.weight, one.bias))
    made = {node: _normal(node) for node in (mlp.gradient, *weights) if node is not None}
    x = _normal(mlp.gate.x)
    return made | {one.x: x for one in layers if one is not mlp.down} | _other_names_of_x(mlp, x)


def _other_names_of_x(mlp: Mlp, x: Tensor) -> dict[fx.Node, Tensor]:
    """What the gradients of the first weights read: x, by nodes of their own perhaps."""
    products = [one.weight for one in (mlp.of_gate, mlp.of_up) if one.weight is not None]
    read = [node for product in products for node in product.all_input_nodes]
    own = {*mlp.forward, *mlp.backward}
    return {node: x for node in read if node not in own}


def _of_head(head: Head) -> dict[fx.Node, Tensor]:
    target: Any = head.loss.args[1]
    at: Tensor = target.meta["val"]
    row_term = head.smoothing.row_term if head.smoothing else None
    read = (head.x, head.weight, head.bias, head.gradient, row_term)
    made = {node: _normal(node) for node in read if node is not None}
    chosen = torch.randint(head.weight.meta["val"].shape[0], at.shape, device=at.device)
    is_ignored = torch.rand(at.shape, device=at.device) < IGNORED_PART
    made[target] = chosen.masked_fill_(is_ignored, cast("int", head.loss.args[4]))
    class_weight = head.loss.args[2]
    if isinstance(class_weight, fx.Node):
        # Several nodes of the head read the same constant by nodes of their own.
        same = [class_weight, *_constants_alike(head, class_weight)]
        made |= dict.fromkeys(same, _normal(class_weight).abs())
    return made


def _constants_alike(head: Head, constant: fx.Node) -> list[fx.Node]:
    """Nodes that the head reads and that stand for the same tensor."""
    read = (one for node in (*head.forward, *head.backward) for one in node.all_input_nodes)
    return [one for one in read if identity_of(one) == identity_of(constant)]


def _normal(node: fx.Node) -> Tensor:
    like: Tensor = node.meta["val"]
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.normal_()
