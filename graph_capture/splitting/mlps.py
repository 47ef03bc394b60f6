"""An MLP of a joint graph: its layers, and the nodes of its forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, fx

from remat.graph_capture.splitting.layers import Linear

HIDDEN, HIDDEN_GATED = 3, 6
"""Tensors of the hidden activation's size that backward of a whole MLP has live at once: what went
into the function, and two gradients; with a gate also what it and up return, and another one."""


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
