"""What is decided of a whole step: order, what is saved, where state lives, when it moves."""

from __future__ import annotations

from typing import Literal

import msgspec

from remat.graph_capture.graph import Op, TrainingGraph
from remat.graph_capture.links import Links, Tier
from remat.graph_capture.optimizer_step.graph import GroupPlace, StepShape, optimizer_step
from remat.graph_capture.optimizer_step.microbatch import Microbatch
from remat.graph_capture.optimizer_step.update import Update

Keeping = Literal["stream", "near", "stay"]
"""Of parameters between two layers that read them: ``stream`` drops them, ``near`` keeps those
that are needed again soonest while there is room (Belady 1966), ``stay`` keeps all."""


class Pass(msgspec.Struct, frozen=True):
    """Microbatches that go through each layer together, forward and back.

    Attributes
    ----------
    microbatches : how many. Passes of one each are batch-major, one pass of all is layer-major.
    options : the option of each layer.
    hosted : how many layers, the first ones, have what they save on the host meanwhile.
    """

    microbatches: int
    options: tuple[int, ...]
    hosted: int = 0


class Setting(msgspec.Struct, frozen=True):
    """All choices of one plan of a whole step.

    Attributes
    ----------
    passes : in order. state : the tier of each group's optimizer state between steps; where it is
        the device, the group's parameters are there too and its update runs there.
    sums : where gradients of several passes are added. kept_gradients : groups whose gradients
        stay on the device from the first pass to the last.
    keeping : of parameters that live on the host. window : groups of them that may be on the
        device at once; 0 for as many as fit. prefetch : whether copies begin before their use.
    slots : states that are on the host at once of groups whose state is on NVMe. spread : whether
        these groups are spread over the updates, rather than the first that are updated.
    device_updates : groups, the last that backward reaches, that the device updates though their
        state is on the host.
    updates : where groups are updated whose state is below the device; ``device`` for each of them
        right after its last backward, as where the host has no processor of its own.
    """

    passes: tuple[Pass, ...]
    state: tuple[Tier, ...]
    sums: Tier = "device"
    kept_gradients: tuple[int, ...] = ()
    keeping: Keeping = "near"
    window: int = 0
    prefetch: bool = True
    slots: int = 3
    spread: bool = False
    device_updates: int = 0
    updates: Tier = "host"

    @property
    def microbatches(self) -> int:
        """Of the whole step."""
        return sum(one.microbatches for one in self.passes)

    @property
    def is_batch_major(self) -> bool:
        """Whether each microbatch goes through all layers and back before the next begins."""
        return all(one.microbatches == 1 for one in self.passes)

    def graph(self, microbatch: Microbatch, update: Update, links: Links | None) -> TrainingGraph:
        """The graph of the step whose values these choices are about."""
        places = tuple(
            GroupPlace(
                parameters="device" if tier == "device" else "host",
                state=tier,
                sums="device" if tier == "device" or at in self.kept_gradients else self.sums,
            )
            for at, tier in enumerate(self.state)
        )
        options = tuple(one.options for one in self.passes for _ in range(one.microbatches))
        return optimizer_step(microbatch, update, StepShape(options, places), links)

    def device_order(self, microbatch: Microbatch, graph: TrainingGraph) -> list[Op]:
        """What the device computes, in order: passes layer by layer, and its own updates.

        Microbatches keep their order in each layer, in which eager adds their gradients.
        """
        names = list[str]()
        layers = range(len(microbatch.layers) - 1)
        turn, first = len(microbatch.layers) - 1, 0
        for one in self.passes:
            each = range(first, first + one.microbatches)
            first += one.microbatches
            names += [f"forward.{at}.{i}" for at in layers for i in each]
            names += [f"turn.{turn}.{i}" for i in each]
            is_last = first == self.microbatches
            for at in (turn, *reversed(layers)):
                names += [f"backward.{at}.{i}" for i in each] if at != turn else []
                names += self._own_updates(microbatch, at) if is_last else []
        names += [f"update.{at}" for at in self.updated_on_device(microbatch)]
        ops = {op.name: op for op in graph.ops}
        return [ops[name] for name in names]

    def updated_on_device(self, microbatch: Microbatch) -> list[int]:
        """Groups that the device updates though their state is on the host, in order."""
        if not self.device_updates or self.updates == "device":
            return []
        late = [at for layer in reversed(microbatch.layers) for at in layer.gives]
        here = [at for at in late if self.state[at] == "host" and self._adds_on_device(at)]
        return here[-self.device_updates :]

    def _adds_on_device(self, group: int) -> bool:
        return self.sums == "device" or group in self.kept_gradients

    def _own_updates(self, microbatch: Microbatch, layer: int) -> list[str]:
        """Updates that the device makes as soon as gradients are whole."""
        gives = microbatch.layers[layer].gives
        here = [at for at in gives if "device" in (self.state[at], self.updates)]
        return [f"update.{at}" for at in here if microbatch.groups[at].trained]

    def state_is_on_nvme(self, value: str) -> bool:
        """Whether a value is the state of a group that is on NVMe between steps."""
        kind, _, at = value.partition(".")
        return kind == "O" and self.state[int(at)] == "nvme"
