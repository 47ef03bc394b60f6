"""MLPs in a joint graph: linear layers with a pointwise function between, and their backward.

Which nodes have the hidden dimension decides what belongs to one. Everything that reads one of them
must be known, else the MLP is none that can run in pieces. So one with dropout after its activation
is not taken: its mask would have to be drawn in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from remat.graph_capture.splitting.activations import (
    ACTIVATIONS,
    activation_of,
    is_gradient_of,
)
from remat.graph_capture.splitting.heads import PRODUCTS, behind_transposes
from remat.graph_capture.splitting.smoothing import SHAPES

aten = torch.ops.aten

HIDDEN, HIDDEN_GATED = 3, 6
"""Tensors of the hidden activation's size that backward of a whole MLP has live at once: what went
into the function, and two gradients; with a gate also what it and up return, and another one."""


class _NoMlpError(Exception):
    """What looks like an MLP is none that can run in pieces."""


class Linear(NamedTuple):
    """A linear layer: the node of its product, and what that reads. weight is (out, in)."""

    product: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


@dataclass
class Gradients:
    """The nodes of a linear layer's gradients, None where nobody needs one."""

    x: fx.Node | None = None
    weight: fx.Node | None = None
    bias: fx.Node | None = None

    def all(self) -> list[fx.Node]:
        """Those that are needed."""
        return [node for node in (self.x, self.weight, self.bias) if node is not None]


@dataclass
class Mlp:
    """One MLP, and the nodes that its forward and its backward consist of.

    Attributes
    ----------
    activation : a name of `ACTIVATIONS`. gate : the layer before it. up : the one whose result it
        is multiplied with, if any. down : the last layer.
    gradient : what backward hands to the product of `down`, (rows, out).
    of_gate, of_up : gradients of these layers. of_down : that of the last weight; not of what the
        layer is given, which is hidden, nor of its bias, which reads nothing hidden.
    forward, backward : nodes that only serve these, each before those that read it.
    """

    activation: str
    gate: Linear
    up: Linear | None
    down: Linear
    gradient: fx.Node
    of_gate: Gradients
    of_up: Gradients
    of_down: Gradients
    forward: list[fx.Node] = field(default_factory=list[fx.Node])
    backward: list[fx.Node] = field(default_factory=list[fx.Node])

    @property
    def name(self) -> str:
        """The name of the product of the last layer."""
        return self.down.product.name

    @property
    def ends(self) -> list[fx.Node]:
        """The nodes whose results others read, forward first."""
        grads = (*self.of_gate.all(), *self.of_up.all(), *self.of_down.all())
        return [self.down.product, *grads]

    @property
    def transient_bytes(self) -> int:
        """The most that hidden tensors take in backward, whole."""
        held = HIDDEN if self.up is None else HIDDEN_GATED
        value: Tensor = self.gate.product.meta["val"]
        return held * value.nbytes


def find_mlps(graph: fx.Graph) -> list[Mlp]:
    """The MLPs of a joint graph that can run in pieces; no node is of two of them."""
    found: list[Mlp] = []
    taken: set[fx.Node] = set()
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        activation = activation_of(node)
        if activation is None:
            continue
        try:
            mlp = _mlp_of(node, activation, order)
        except _NoMlpError:
            continue
        if taken.isdisjoint((*mlp.forward, *mlp.backward)):
            taken.update((*mlp.forward, *mlp.backward))
            found.append(mlp)
    return found


def _mlp_of(function: fx.Node, activation: str, order: dict[fx.Node, int]) -> Mlp:
    gate = _linear_above(function.args[0])
    inner, up, down = function, None, _linear_below(function)
    if down is None:
        inner, up = _gating(function, gate)
        down = _linear_below(inner)
    if down is None:
        raise _NoMlpError
    of_function = _gradient_of(function, activation, gate)
    hidden, handed = [gate.product, function, of_function], of_function
    if up is not None:
        handed = _only(n for n in _sources(of_function.args[0]) if n.target is aten.mul.Tensor)
        hidden += [up.product, inner, handed]
    of_inner = _product_above(handed, down)
    hidden.append(of_inner)
    of_up = Gradients()
    if up is not None:
        _require_factors(handed, of_inner, up.product)
        of_up_product = _other_factor(of_inner, handed, function)
        hidden.append(of_up_product)
        of_up = _gradients(up, of_up_product)
    gradient: Any = of_inner.args[0]
    of_gate, of_down = _gradients(gate, of_function), _weight_gradient(inner, gradient)
    made = Mlp(activation, gate, up, down, gradient, of_gate, of_up, of_down)
    _collect(made, hidden, order)
    return made


def _gradient_of(function: fx.Node, activation: str, gate: Linear) -> fx.Node:
    """The node of the activation's backward."""
    of_result = ACTIVATIONS[activation].of_result
    made = _only(
        user
        for user in dict.fromkeys((*_readers(function), *_readers(gate.product)))
        if is_gradient_of(activation, user)
    )
    if _sources(made.args[1])[-1] is not (function if of_result else gate.product):
        raise _NoMlpError
    return made


def _collect(mlp: Mlp, hidden: list[fx.Node], order: dict[fx.Node, int]) -> None:
    """Set the nodes of forward and backward, if all that read hidden tensors are among them."""
    if mlp.of_gate.weight is None and mlp.of_down.weight is None:
        raise _NoMlpError
    if _trains_a_bias_alone(mlp.of_gate) or _trains_a_bias_alone(mlp.of_up):
        raise _NoMlpError
    width = mlp.gate.product.meta["val"].shape[-1]
    names = [one for node in hidden for one in _aliases(node)]
    if any(one.meta["val"].shape[-1] != width for one in names):
        raise _NoMlpError
    turned = [u for one in names for u in one.users if u.target is aten.t.default]
    own, ends = dict.fromkeys((*names, *turned)), mlp.ends
    if any(user not in own and user not in ends for one in own for user in one.users):
        raise _NoMlpError
    every = sorted({*own, *ends, *_turned(mlp)}, key=order.__getitem__)
    after = order[mlp.down.product]
    mlp.forward = [one for one in every if order[one] <= after]
    mlp.backward = [one for one in every if order[one] > after]


def _trains_a_bias_alone(of: Gradients) -> bool:
    return of.bias is not None and of.weight is None


def _linear_above(node: Any) -> Linear:
    """The layer whose result `node` is, in another shape at most."""
    product = _sources(node)[-1]
    found = _linear(product)
    if found is None:
        raise _NoMlpError
    return found


def _linear(product: fx.Node) -> Linear | None:
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


def _linear_below(node: fx.Node) -> Linear | None:
    """The one layer that is given `node`, in another shape at most."""
    names = _aliases(node)
    found = [
        layer
        for one in names
        for user in one.users
        if (layer := _linear(user)) is not None and layer.x is one
    ]
    return found[0] if len(found) == 1 else None


def _gating(function: fx.Node, gate: Linear) -> tuple[fx.Node, Linear]:
    """The product of the activation with another layer of the same input, and that layer."""
    for user in function.users:
        if user.target is not aten.mul.Tensor or user.args[0] is user.args[1]:
            continue
        other: Any = user.args[1] if user.args[0] is function else user.args[0]
        if not isinstance(other, fx.Node):
            continue
        up = _linear(_sources(other)[-1])
        if up is not None and _is_beside(up, gate):
            return user, up
    raise _NoMlpError


def _is_beside(up: Linear, gate: Linear) -> bool:
    """Whether both layers read the same rows, and have as many results."""
    same = _sources(up.x)[-1] is _sources(gate.x)[-1] and up.product is not gate.product
    shapes = [(one.x.meta["val"].shape, one.product.meta["val"].shape) for one in (up, gate)]
    return same and shapes[0] == shapes[1]


def _sources(node: Any) -> list[fx.Node]:
    """`node`, and what it is another shape or name of."""
    if not isinstance(node, fx.Node):
        raise _NoMlpError
    found = [node]
    while found[-1].target in (*SHAPES, aten.detach.default):
        above = found[-1].args[0]
        assert isinstance(above, fx.Node)
        found.append(above)
    return found


def _aliases(node: fx.Node) -> list[fx.Node]:
    """`node`, and nodes that are it in another shape or under another name."""
    own = [user for user in node.users if user.target in (*SHAPES, aten.detach.default)]
    return [node, *(alias for user in own for alias in _aliases(user))]


def _readers(node: Any) -> list[fx.Node]:
    """Nodes that read `node`, also through names and other shapes of it."""
    if not isinstance(node, fx.Node):
        raise _NoMlpError
    names = _aliases(node)
    return list(dict.fromkeys(u for one in names for u in one.users if u not in names))


def _only(found: Iterator[fx.Node]) -> fx.Node:
    nodes = list(dict.fromkeys(found))
    if len(nodes) != 1:
        raise _NoMlpError
    return nodes[0]


def _product_above(handed: fx.Node, down: Linear) -> fx.Node:
    """The product that makes the gradient of what the last layer is given."""
    for arg in handed.args[:2]:
        source = _sources(arg)[-1]
        if source.target is aten.mm.default and behind_transposes(source.args[1]) is down.weight:
            return source
    raise _NoMlpError


def _require_factors(product: fx.Node, first: fx.Node, second: fx.Node) -> None:
    """Require that a node multiplies two others."""
    if {_sources(arg)[-1] for arg in product.args} != {first, second}:
        raise _NoMlpError


def _other_factor(of_inner: fx.Node, handed: fx.Node, function: fx.Node) -> fx.Node:
    """The gradient of what up returns: that of the product, times the activation."""
    made = _only(
        user for user in _readers(of_inner) if user is not handed and user.target is aten.mul.Tensor
    )
    _require_factors(made, of_inner, function)
    return made


def _weight_gradient(inner: fx.Node, gradient: fx.Node) -> Gradients:
    """The gradient of the last weight, which sums over all rows."""
    for user in _readers(inner):
        if user.target is aten.mm.default and _is_transpose_of(user.args[0], gradient):
            return Gradients(weight=user)
    return Gradients()


def _turned(mlp: Mlp) -> list[fx.Node]:
    """The transpose that the last weight's gradient reads, if nothing else does."""
    product = mlp.of_down.weight
    turned: Any = product.args[0] if product is not None else None
    return [turned] if turned is not None and len(turned.users) == 1 else []


def _is_transpose_of(node: Any, of: fx.Node) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.t.default and node.args[0] is of


def _gradients(layer: Linear, of_product: fx.Node) -> Gradients:
    """The gradients of a layer from that of its result."""
    made = Gradients()
    for one in _aliases(of_product):
        for user in one.users:
            if user.target is aten.mm.default and user.args[0] is one:
                if behind_transposes(user.args[1]) is not layer.weight or made.x is not None:
                    raise _NoMlpError
                made.x = user
            elif user.target is aten.sum.dim_IntList and list(user.args[1:]) == [[0], True]:
                made.bias = user
            elif user.target is aten.t.default:
                made.weight = _only(iter(user.users))
                read = made.weight.args
                if made.weight.target is not aten.mm.default or read[0] is not user:
                    raise _NoMlpError
                if _sources(read[1])[-1] is not _sources(layer.x)[-1]:
                    raise _NoMlpError
    return made
