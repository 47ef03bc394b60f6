"""Finds MLPs in a joint graph: linear layers with a pointwise function between, and backward.

All that reads a node with the hidden dimension must be known, else the MLP cannot run in chunks. So
one with dropout after its activation is not taken: its mask would have to be drawn in chunks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.chunking.head import (
    Linear,
    NoMlpError,
    aliases_of,
    behind_transposes,
    linear_above,
    linear_below,
    linear_of,
    readers_of,
    sources_of,
    the_only,
)
from remat.graph_capture.joint.nodes import aten

# On a CPU, a kernel takes the rest at the end of each thread's part one by one, not by vectors.
# float32's GELU and SiLU have other last bits that way, so a block may differ from the whole in a
# few elements. Data that is made for a comparison might not show that.

_VECTOR_ELEMENTS = 64  # a multiple of what any CPU's loop takes at once: two vectors of 64 bytes
_GRAIN_ELEMENTS = 1 << 15  # of a thread; torch splits work from here on (`GRAIN_SIZE`)
_COMPARED = 1 << 20  # elements that show whether a function has other bits one by one


@dataclass(frozen=True)
class _Activation:
    forward: Any
    backward: Any
    of_result: bool = False  # backward reads the function's result, not what it was given
    more: tuple[Any, ...] = ()  # further arguments of backward
    options: dict[str, Any] = field(default_factory=dict[str, Any])  # of both

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x, **self.options)

    def gradient(self, of_result: Tensor, read: Tensor) -> Tensor:
        return self.backward(of_result, read, *self.more, **self.options)


ACTIVATIONS: dict[str, _Activation] = {
    "gelu": _Activation(aten.gelu.default, aten.gelu_backward.default),
    "gelu_tanh": _Activation(
        aten.gelu.default, aten.gelu_backward.default, options={"approximate": "tanh"}
    ),
    "relu": _Activation(aten.relu.default, aten.threshold_backward.default, True, (0,)),
    "silu": _Activation(aten.silu.default, aten.silu_backward.default),
    "tanh": _Activation(aten.tanh.default, aten.tanh_backward.default, True),
    "sigmoid": _Activation(aten.sigmoid.default, aten.sigmoid_backward.default, True),
}


def _is_gradient_of(name: str, node: fx.Node) -> bool:
    one = ACTIVATIONS[name]
    same = node.target is one.backward and tuple(node.args[2:]) == one.more
    return same and _options(node) == one.options


def _options(node: fx.Node) -> dict[str, Any]:
    """Keyword arguments, without those that say what is so by default."""
    return {key: value for key, value in node.kwargs.items() if value != "none"}


def has_equal_blocks(name: str, like: Tensor, sizes: list[int]) -> bool:
    """Whether no element of tensors of these `sizes` hangs on how many there are."""
    if like.device.type != "cpu" or _is_the_same_one_by_one(name, like.dtype):
        return True
    most = torch.get_num_threads()
    for size in sizes:
        # A smaller tensor may go to fewer threads.
        counts = [1, most] if size >= most * _GRAIN_ELEMENTS else range(1, most + 1)
        if any(-(-size // count) % _VECTOR_ELEMENTS for count in counts):
            return False
    return True


@functools.cache
def _is_the_same_one_by_one(name: str, dtype: torch.dtype) -> bool:
    """Whether function and derivative have the same bits by vectors and one by one, on this CPU."""
    # Every second of a tensor's elements: kernels read a tensor with gaps one by one.
    one, random = ACTIVATIONS[name], torch.Generator().manual_seed(0)
    x, of_result = (torch.randn(_COMPARED, 2, generator=random).to(dtype)[:, 0] for _ in range(2))
    if dtype.itemsize == 2:
        # All of its values that are finite and more: NaNs are compared by none.
        every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
        x[: len(every)] = torch.where(every.isfinite(), every, 0)
    close, of_close = x.contiguous(), of_result.contiguous()
    result = one(close)
    if not torch.equal(one(x), result):
        return False
    read = x if not one.of_result else torch.stack([result, result], 1)[:, 0]
    expected = one.gradient(of_close, result if one.of_result else close)
    return torch.equal(one.gradient(of_result, read), expected)


# An MLP of a joint graph: its layers, and the nodes of its forward and its backward.

# Hidden-sized tensors that a whole MLP's backward holds: what went into the function, and two
# gradients; with a gate also what it and up return, and another one.
_HIDDEN, _HIDDEN_GATED = 3, 6


@dataclass
class _MlpGradients:
    x: fx.Node | None = None
    weight: fx.Node | None = None
    bias: fx.Node | None = None

    def all(self) -> list[fx.Node]:
        return [node for node in (self.x, self.weight, self.bias) if node is not None]


@dataclass
class Mlp:
    activation: str  # a name of `ACTIVATIONS`
    gate: Linear  # the layer before it
    up: Linear | None  # the one whose result it is multiplied with, if any
    down: Linear
    gradient: fx.Node  # what backward hands to the product of `down`, (rows, out)
    of_gate: _MlpGradients
    of_up: _MlpGradients
    of_down: _MlpGradients  # of the weight alone, as the bias's reads nothing hidden
    forward: list[fx.Node] = field(default_factory=list[fx.Node])  # in graph order; they only serve
    backward: list[fx.Node] = field(default_factory=list[fx.Node])

    @property
    def name(self) -> str:
        return self.down.product.name

    @property
    def ends(self) -> list[fx.Node]:
        return [self.down.product, *self.of_gate.all(), *self.of_up.all(), *self.of_down.all()]

    @property
    def transient_bytes(self) -> int:
        value: Tensor = self.gate.product.meta["val"]
        return (_HIDDEN if self.up is None else _HIDDEN_GATED) * value.nbytes


def find_mlps(graph: fx.Graph) -> list[Mlp]:
    """The MLPs of a joint graph that can run in chunks; no node is of two of them."""
    found, taken = list[Mlp](), set[fx.Node]()
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        known = (name for name, one in ACTIVATIONS.items() if node.target is one.forward)
        activation = next((n for n in known if _options(node) == ACTIVATIONS[n].options), None)
        if activation is None or len(node.args) != 1:
            continue
        try:
            mlp = _mlp_of(node, activation, order)
        except NoMlpError:
            continue
        own = (*mlp.forward, *mlp.backward)
        if taken.isdisjoint(own):
            taken.update(own)
            found.append(mlp)
    return found


def _mlp_of(function: fx.Node, activation: str, order: dict[fx.Node, int]) -> Mlp:
    gate = linear_above(function.args[0])
    inner, up, down = function, None, linear_below(function)
    if down is None:
        inner, up = _gating(function, gate)
        down = linear_below(inner)
    if down is None:
        raise NoMlpError
    of_function = _gradient_of(function, activation, gate)
    hidden, handed = [gate.product, function, of_function], of_function
    if up is not None:
        handed = the_only(n for n in sources_of(of_function.args[0]) if n.target is aten.mul.Tensor)
        hidden += [up.product, inner, handed]
    of_inner = _product_above(handed, down)
    hidden.append(of_inner)
    of_up = _MlpGradients()
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
    readers = (*readers_of(function), *readers_of(gate.product))
    made = the_only(user for user in readers if _is_gradient_of(activation, user))
    read = function if ACTIVATIONS[activation].of_result else gate.product
    if sources_of(made.args[1])[-1] is not read:
        raise NoMlpError
    return made


def _collect(mlp: Mlp, hidden: list[fx.Node], order: dict[fx.Node, int]) -> None:
    is_trained = mlp.of_gate.weight is not None or mlp.of_down.weight is not None
    # No bias is trained alone.
    if not is_trained or any(of.bias and not of.weight for of in (mlp.of_gate, mlp.of_up)):
        raise NoMlpError
    width = mlp.gate.product.meta["val"].shape[-1]
    names = [one for node in hidden for one in aliases_of(node)]
    if any(one.meta["val"].shape[-1] != width for one in names):  # blocks are cut along that dim
        raise NoMlpError
    turned = [u for one in names for u in one.users if u.target is aten.t.default]
    own, ends = dict.fromkeys((*names, *turned)), mlp.ends
    if any(user not in own and user not in ends for one in own for user in one.users):
        raise NoMlpError
    product = mlp.of_down.weight
    read: Any = product.args[0] if product is not None else None
    # The transpose that the last weight's gradient reads, if nothing else does.
    alone = [read] if read is not None and len(read.users) == 1 else []
    every = sorted({*own, *ends, *alone}, key=order.__getitem__)
    after = order[mlp.down.product]
    mlp.forward = [one for one in every if order[one] <= after]
    mlp.backward = [one for one in every if order[one] > after]


def _gating(function: fx.Node, gate: Linear) -> tuple[fx.Node, Linear]:
    for user in function.users:
        if user.target is not aten.mul.Tensor or user.args[0] is user.args[1]:
            continue
        other: Any = user.args[1] if user.args[0] is function else user.args[0]
        up = linear_of(sources_of(other)[-1]) if isinstance(other, fx.Node) else None
        if up is None or up.product is gate.product:
            continue
        shapes = [(one.x.meta["val"].shape, one.product.meta["val"].shape) for one in (up, gate)]
        if sources_of(up.x)[-1] is sources_of(gate.x)[-1] and shapes[0] == shapes[1]:
            return user, up
    raise NoMlpError


def _product_above(handed: fx.Node, down: Linear) -> fx.Node:
    """The product that makes the gradient of what the last layer is given."""
    for arg in handed.args[:2]:
        source = sources_of(arg)[-1]
        if source.target is aten.mm.default and behind_transposes(source.args[1]) is down.weight:
            return source
    raise NoMlpError


def _require_factors(product: fx.Node, first: fx.Node, second: fx.Node) -> None:
    if {sources_of(arg)[-1] for arg in product.args} != {first, second}:
        raise NoMlpError


def _other_factor(of_inner: fx.Node, handed: fx.Node, function: fx.Node) -> fx.Node:
    """The gradient of what up returns: that of the product, times the activation."""
    products = (user for user in readers_of(of_inner) if user.target is aten.mul.Tensor)
    made = the_only(user for user in products if user is not handed)
    _require_factors(made, of_inner, function)
    return made


def _weight_gradient(inner: fx.Node, gradient: fx.Node) -> _MlpGradients:
    for user in readers_of(inner):
        turned: Any = user.args[0]
        is_product = user.target is aten.mm.default and isinstance(turned, fx.Node)
        if is_product and turned.target is aten.t.default and turned.args[0] is gradient:
            return _MlpGradients(weight=user)
    return _MlpGradients()


def _gradients(layer: Linear, of_product: fx.Node) -> _MlpGradients:
    made = _MlpGradients()
    for one in aliases_of(of_product):
        for user in one.users:
            if user.target is aten.mm.default and user.args[0] is one:
                if behind_transposes(user.args[1]) is not layer.weight or made.x is not None:
                    raise NoMlpError
                made.x = user
            elif user.target is aten.sum.dim_IntList and list(user.args[1:]) == [[0], True]:
                made.bias = user
            elif user.target is aten.t.default:
                made.weight = the_only(iter(user.users))
                is_product = made.weight.target is aten.mm.default
                if not is_product or made.weight.args[0] is not user:
                    raise NoMlpError
                if sources_of(made.weight.args[1])[-1] is not sources_of(layer.x)[-1]:
                    raise NoMlpError
    return made
