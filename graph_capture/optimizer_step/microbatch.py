"""What one microbatch takes, layer by layer: the facts that a graph of the whole step is made of.

A layer is a run of forward ops with their backward ops, a group the parameters that the same layers
read. All of it comes from a captured graph of one batch (`solver/whole_step/layers.py`).
"""

from __future__ import annotations

import math
import re

import msgspec

from remat.graph_capture.graph import Resident

IDS = re.compile(r": int64\[(\d+(?:, \d+)*)\]")
"""How the signature of an input begins that holds ids."""


class LayerOption(msgspec.Struct, frozen=True):
    """One way to run a layer.

    Attributes
    ----------
    saved_bytes : kept from its forward to its backward, without what other layers read.
    extra_us : time of what its backward computes again.
    forward_workspace_bytes, backward_workspace_bytes : the most that is live in each phase beside
        what it reads, what it saves and what it hands on. That of backward holds the gradients
        of its parameters, which it makes anew before they are added.
    recomputed : what runs again right before each op of the layer, and after the last; an entry is
        an index into its ops, which are its forward ops, the turn, and its backward ops.
    """

    saved_bytes: int
    extra_us: float
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    recomputed: tuple[tuple[int, ...], ...] = ()


class Layer(msgspec.Struct, frozen=True):
    """Forward ops that run as one, and their backward ops.

    Attributes
    ----------
    name : the modules that its ops are of.
    groups : indices of the parameter groups that it reads. gives : of those whose gradients its
        backward makes.
    forward_us, backward_us : times of its ops once.
    reads, makes : values between layers that its forward reads and makes. back_reads, back_makes :
        the same of its backward.
    options : ways to run it, fastest first.
    turns : whether backward begins in it, so that both its phases run as one op.
    forward_ops, backward_ops : names of its ops in the captured graph, in order.
    """

    name: str
    groups: tuple[int, ...]
    gives: tuple[int, ...]
    forward_us: float
    backward_us: float
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    back_reads: tuple[str, ...]
    back_makes: tuple[str, ...]
    options: tuple[LayerOption, ...]
    turns: bool = False
    forward_ops: tuple[str, ...] = ()
    backward_ops: tuple[str, ...] = ()


class Group(msgspec.Struct, frozen=True):
    """Parameters that are moved and updated together.

    Attributes
    ----------
    name : of the layer that reads them. trained : how many numbers of them are updated.
    parameter_bytes : of all. gradient_bytes : of the gradients. Both as the allocator rounds.
    item_bytes : of one trained number.
    gradient_of : by the name of each parameter in the captured graph, the name of its gradient;
        empty for one that is frozen.
    update_workspace_bytes : what the update of any one of them takes meanwhile.
    """

    name: str
    trained: int
    parameter_bytes: int
    gradient_bytes: int
    item_bytes: int
    gradient_of: dict[str, str] = {}
    update_workspace_bytes: int = 0


class Microbatch(msgspec.Struct, frozen=True):
    """One microbatch through all layers and back.

    Attributes
    ----------
    name : of the model. layers : in forward order; the last one turns.
    sizes : bytes of each value between layers. outputs : those that live until the step ends.
    resident : bytes that live throughout: buffers, one batch, what libraries keep.
    device, inputs, prices : as of the captured graph.
    draws : whether forward draws random numbers or changes buffers, so that microbatches must run
        one after the other.
    """

    name: str
    layers: tuple[Layer, ...]
    groups: tuple[Group, ...]
    sizes: dict[str, int]
    outputs: tuple[str, ...]
    resident: Resident
    device: str
    inputs: tuple[str, ...]
    prices: str
    draws: bool

    @property
    def least_us(self) -> float:
        """Time of every op once: no schedule computes a microbatch faster."""
        return sum(layer.forward_us + layer.backward_us for layer in self.layers)

    @property
    def n_tokens(self) -> int:
        """Numbers in the first input, if they are whole ones, as ids of tokens are; else 0."""
        found = IDS.search(self.inputs[0]) if self.inputs else None
        return math.prod(int(size) for size in found[1].split(",")) if found else 0
