"""Linear layers in a joint graph, and nodes behind names and other shapes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from remat.graph_capture.splitting.smoothing import SHAPES

aten = torch.ops.aten

PRODUCTS = (aten.mm.default, aten.addmm.default)
_NAMES = (*SHAPES, aten.detach.default)


class NoMlpError(Exception):
    """What looks like an MLP is none that can run in pieces."""


class Linear(NamedTuple):
    """A linear layer: the node of its product, and what that reads. weight is (out, in)."""

    product: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


def linear_above(node: Any) -> Linear:
    """The layer whose result `node` is, in another shape at most."""
    product = sources_of(node)[-1]
    found = linear_of(product)
    if found is None:
        raise NoMlpError
    return found


def linear_of(product: fx.Node) -> Linear | None:
    """A product with a transposed weight as a layer."""
    if product.target not in PRODUCTS or product.kwargs:
        return None
    bias, x, weight = (None, *product.args) if len(product.args) == 2 else product.args[:3]
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    if weight.target is not aten.t.default or len(product.args) > 3:
        return None
    if bias is not None and (not isinstance(bias, fx.Node) or bias.meta["val"].dim() != 1):
        return None
    source = weight.args[0]
    assert isinstance(source, fx.Node)
    return Linear(product, x, source, bias)


def linear_below(node: fx.Node) -> Linear | None:
    """The one layer that is given `node`, in another shape at most."""
    names = aliases_of(node)
    found = [
        layer
        for one in names
        for user in one.users
        if (layer := linear_of(user)) is not None and layer.x is one
    ]
    return found[0] if len(found) == 1 else None


def sources_of(node: Any) -> list[fx.Node]:
    """`node`, and what it is another shape or name of."""
    if not isinstance(node, fx.Node):
        raise NoMlpError
    found = [node]
    while found[-1].target in _NAMES:
        above = found[-1].args[0]
        assert isinstance(above, fx.Node)
        found.append(above)
    return found


def aliases_of(node: fx.Node) -> list[fx.Node]:
    """`node`, and nodes that are it in another shape or under another name."""
    own = [user for user in node.users if user.target in _NAMES]
    return [node, *(alias for user in own for alias in aliases_of(user))]


def readers_of(node: Any) -> list[fx.Node]:
    """Nodes that read `node`, also through names and other shapes of it."""
    if not isinstance(node, fx.Node):
        raise NoMlpError
    names = aliases_of(node)
    return list(dict.fromkeys(u for one in names for u in one.users if u not in names))


def the_only(found: Iterator[fx.Node]) -> fx.Node:
    """The one node that was found; raises `NoMlpError` for none or several."""
    nodes = list(dict.fromkeys(found))
    if len(nodes) != 1:
        raise NoMlpError
    return nodes[0]


def behind_transposes(node: Any) -> fx.Node | None:
    """The tensor that an even number of transposes leads to."""
    n_transposes = 0
    while isinstance(node, fx.Node) and node.target is aten.t.default:
        node, n_transposes = node.args[0], n_transposes + 1
    return node if isinstance(node, fx.Node) and n_transposes % 2 == 0 else None
