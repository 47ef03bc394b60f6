"""What one microbatch takes, layer by layer: the facts that a graph of the whole step is made of.

A layer is a run of forward ops with their backward ops, a group the parameters that the same layers
read. All of it comes from a captured graph of one batch (`remat/whole_step/layers.py`).
"""

from __future__ import annotations

import math
import re
from typing import Literal

import msgspec
from msgspec.structs import replace

from remat.graph_capture.devices.known_devices import modelled_device, shares_of
from remat.graph_capture.devices.links import RankLinks
from remat.graph_capture.distributed.sharding import shard_shape
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import FLOAT32_BYTES, Optimizer, Resident

_IDS = re.compile(r": int64\[(\d+(?:, \d+)*)\]")
"""How the signature of an input begins that holds ids."""


class LayerOption(msgspec.Struct, frozen=True):
    """One way to run a layer.

    `saved_bytes` : kept from its forward to its backward, without what other layers read.
    `extra_us` : time of what its backward computes again. `forward_workspace_bytes`,
    `backward_workspace_bytes` : the most that is live in each phase beside what it reads, what it
    saves and what it hands on. That of backward holds the gradients of its parameters, which it
    makes anew before they are added. `recomputed` : what runs again right before each op of the
    layer, and after the last; an entry is an index into its ops, which are its forward ops, the
    turn, and its backward ops.
    """

    saved_bytes: int
    extra_us: float
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    recomputed: tuple[tuple[int, ...], ...] = ()


class Layer(msgspec.Struct, frozen=True):
    """Forward ops that run as one, and their backward ops.

    `groups` : indices of the parameter groups that it reads. `gives` : of those whose gradients its
    backward makes. `forward_us`, `backward_us` : times of its ops once. `reads`, `makes` : values
    between layers that its forward reads and makes. `options` : fastest first. `turns` : whether
    backward begins in it, so that both its phases run as one op. `forward_ops`, `backward_ops` :
    names of its ops in the captured graph, in order.
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


class UpdateGroup(msgspec.Struct, frozen=True):
    """Parameters that are moved and updated together.

    `trained` : how many numbers of them are updated. `item_bytes` : of one of these.
    `parameter_bytes`, `gradient_bytes` : of all, as the allocator rounds. `gradient_of` : by the
    name of each parameter in the captured graph, the name of its gradient; empty for one that is
    frozen. `update_workspace_bytes` : what the update of any one of them takes meanwhile. With
    several ranks, the bytes are of one's shards, and those of ``whole`` of all together.
    """

    name: str
    trained: int
    parameter_bytes: int
    gradient_bytes: int
    item_bytes: int
    gradient_of: dict[str, str] = {}
    update_workspace_bytes: int = 0
    whole_parameter_bytes: int = 0
    whole_gradient_bytes: int = 0

    @property
    def updated(self) -> list[str]:
        """Names of the parameters that are not frozen."""
        return [name for name, gradient in self.gradient_of.items() if gradient]


class Ranks(msgspec.Struct, frozen=True):
    """The ranks that share one step, seen from one of them.

    `count` : of all. `here` : of its machine. `links` : between them, as far as hosts let them.
    `over_host` : whether collectives go by the device's link to the host. `keeps_whole` : whether
    parameters stay whole from forward to backward (ZeRO-2) rather than only while a layer runs.
    """

    count: int
    here: int
    links: RankLinks
    over_host: bool = False
    keeps_whole: bool = False

    def gather_us(self, whole_bytes: int) -> float:
        return self.links.us("all_gather", whole_bytes, self.count)

    def reduce_us(self, whole_bytes: int) -> float:
        return self.links.us("reduce_scatter", whole_bytes, self.count)

    def shard_elements(self, shape: tuple[int, ...]) -> int:
        return math.prod(shard_shape(shape, self.count))


class Microbatch(msgspec.Struct, frozen=True):
    """One microbatch through all layers and back.

    `layers` : in forward order; the last one turns. `sizes` : bytes of each value between layers.
    `outputs` : those that live until the step ends. `resident` : bytes that live throughout:
    buffers, one batch, what libraries keep. `draws` : whether forward draws random numbers or
    changes buffers, so that microbatches must run one after the other. `ranks` : None for one; of
    several, `groups` are the shards of one.
    """

    name: str
    layers: tuple[Layer, ...]
    groups: tuple[UpdateGroup, ...]
    sizes: dict[str, int]
    outputs: tuple[str, ...]
    resident: Resident
    device: str
    inputs: tuple[str, ...]
    cost_origin: str = msgspec.field(name="prices")
    draws: bool
    ranks: Ranks | None = None

    @property
    def least_us(self) -> float:
        """Time of every op once: no schedule computes a microbatch faster."""
        return sum(layer.forward_us + layer.backward_us for layer in self.layers)

    def collectives_us(self, *, gathers: int, reductions: int) -> float:
        """Time in which each group is made whole and its gradients are reduced so many times."""
        if (ranks := self.ranks) is None:
            return 0.0
        return sum(
            gathers * ranks.gather_us(one.whole_parameter_bytes)
            + reductions * ranks.reduce_us(one.whole_gradient_bytes)
            for one in self.groups
        )

    def resident_of(self, count: int) -> Resident:
        # All batches are in memory during the whole step.
        return replace(self.resident, batch_bytes=count * self.resident.batch_bytes)

    @property
    def n_tokens(self) -> int:
        """Numbers in the first input, if they are whole ones, as ids of tokens are; else 0."""
        found = _IDS.search(self.inputs[0]) if self.inputs else None
        return math.prod(int(size) for size in found[1].split(",")) if found else 0


StateKind = Literal["float32", "parameter"]
"""``float32``: moments of 4 bytes and, of parameters in fewer, a master copy of 4 bytes, as
mixed-precision training keeps them (K = 12 for Adam: Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054, section 3.1). ``parameter``: moments in the parameter's own type,
as torch's optimizers make them, and no master copy."""

MOMENTS = {"sgd": 0, "momentum": 1, "adamw": 2}  # numbers that an optimizer keeps of each parameter
HOST_GB_S = 60.0
"""Rate of a host's memory that is not here, in 10^9 bytes a second: about 0.8 of what two channels
of DDR5-4800 have (76.8, JEDEC JESD79-5)."""


class ParameterUpdate(msgspec.Struct, frozen=True):
    state_bytes: int
    workspace_bytes: int


class Update(msgspec.Struct, frozen=True):
    """An optimizer's update; rates of the memories that it goes through, in 10^9 bytes a second."""

    optimizer: Optimizer
    state: StateKind
    host_gb_s: float
    device_gb_s: float

    @classmethod
    def on(cls, device: str, optimizer: Optimizer, state: StateKind = "float32",
           host_gb_s: float = HOST_GB_S) -> Update:  # fmt: skip
        if optimizer not in MOMENTS:
            raise CaptureError(
                f"choose one of {', '.join(MOMENTS)}: a whole step needs the update of an "
                f"optimizer, and {optimizer!r} is unknown"
            )
        # The share of the bandwidth that ops other than products reach, updates among them.
        known = modelled_device(device)
        share = shares_of(known)["other"].bandwidth
        return cls(optimizer, state, host_gb_s, known.bandwidth_gb_s * share)

    def state_bytes(self, group: UpdateGroup) -> int:
        return int(group.trained * self._state_of_one(group.item_bytes))

    def host_us(self, group: UpdateGroup) -> float:
        return self._touched_bytes(group) / (self.host_gb_s * 1e3)

    def device_us(self, group: UpdateGroup) -> float:
        return self._touched_bytes(group) / (self.device_gb_s * 1e3)

    def add_us(self, gradient_bytes: int, *, on_host: bool) -> float:
        # Two are read, one is written.
        return 3 * gradient_bytes / ((self.host_gb_s if on_host else self.device_gb_s) * 1e3)

    def _state_of_one(self, item_bytes: int) -> float:
        moments = MOMENTS[self.optimizer]
        if self.state == "parameter":
            return moments * item_bytes
        master = FLOAT32_BYTES if item_bytes < FLOAT32_BYTES else 0
        return moments * FLOAT32_BYTES + master

    def _touched_bytes(self, group: UpdateGroup) -> float:
        item_bytes = group.item_bytes
        # Without a master copy, the parameter is read as well as written.
        has_master = self.state == "float32" and item_bytes < FLOAT32_BYTES
        parameter = item_bytes if has_master else 2 * item_bytes
        # Updates are bound by memory: read the gradient, read and write the state.
        return group.trained * (item_bytes + parameter + 2 * self._state_of_one(item_bytes))
