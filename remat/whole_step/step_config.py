"""What is decided of a whole step: order, what is saved, where state lives, when it moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from remat.graph_capture.distributed.sharding import GATHER, REDUCE
from remat.graph_capture.graph import Links, Op, Tier, TrainingGraph
from remat.whole_step.microbatch import Microbatch, Update
from remat.whole_step.step_graph import GroupPlace, optimizer_step

_Keeping = Literal["stream", "near", "stay"]
"""Of parameters between two layers that read them: ``stream`` drops them, ``near`` keeps those
that are needed again soonest while there is room (Belady 1966), ``stay`` keeps all."""


class Pass(msgspec.Struct, frozen=True):
    """Microbatches that go through each layer together, forward and back.

    Passes of one each are batch-major, one pass of all is layer-major. `options` : of each layer.
    `hosted` : how many layers, the first ones, have what they save on the host meanwhile.
    """

    microbatches: int
    options: tuple[int, ...]
    hosted: int = 0


class StepConfig(msgspec.Struct, frozen=True):
    """All choices of one plan of a whole step.

    `state` : the tier of each group's optimizer state between steps; where it is the device, the
    group's parameters are there too and its update runs there. `sums` : where gradients of several
    passes are added. `kept_gradients` : groups whose gradients stay on the device from the first
    pass to the last. `keeping` : of parameters that live on the host. `window` : groups of them
    that may be on the device at once; 0 for as many as fit. `prefetch` : whether copies begin
    before their use. `slots` : states that are on the host at once of groups whose state is on
    NVMe. `spread` : whether these groups are spread over the updates, rather than the first that
    are updated. `device_updates` : groups, the last that backward reaches, that the device updates
    though their state is on the host. `updates` : where groups are updated whose state is below the
    device; ``device`` for each of them right after its last backward, as where the host has no
    processor of its own.
    """

    passes: tuple[Pass, ...]
    state: tuple[Tier, ...]
    sums: Tier = "device"
    kept_gradients: tuple[int, ...] = ()
    keeping: _Keeping = "near"
    window: int = 0
    prefetch: bool = True
    slots: int = 3
    spread: bool = False
    device_updates: int = 0
    updates: Tier = "host"

    @property
    def microbatches(self) -> int:
        return sum(one.microbatches for one in self.passes)

    def graph(self, microbatch: Microbatch, update: Update, links: Links | None) -> TrainingGraph:
        places = list[GroupPlace]()
        for at, tier in enumerate(self.state):
            # The device's update reads the sum there.
            here = tier == "device" or at in self.kept_gradients
            parameters: Tier = "device" if tier == "device" else "host"
            places.append(GroupPlace(parameters, tier, "device" if here else self.sums))
        options = tuple(one.options for one in self.passes for _ in range(one.microbatches))
        passes = [one.microbatches for one in self.passes]
        return optimizer_step(microbatch, update, options, places, links, passes)

    def device_order(self, microbatch: Microbatch, graph: TrainingGraph) -> list[Op]:
        names = list[str]()
        layers = range(len(microbatch.layers) - 1)
        turn, first = len(microbatch.layers) - 1, 0
        for one in self.passes:
            each = range(first, first + one.microbatches)
            first += one.microbatches
            # Each layer takes microbatches in order, as eager adds their gradients.
            names += [f"forward.{at}.{i}" for at in layers for i in each]
            names += [f"turn.{turn}.{i}" for i in each]
            is_last = first == self.microbatches
            for at in (turn, *reversed(layers)):
                names += [f"backward.{at}.{i}" for i in each] if at != turn else []
                # Gradients are complete only in the last pass.
                own = microbatch.layers[at].gives if is_last else ()
                here = (g for g in own if "device" in (self.state[g], self.updates))
                names += [f"update.{g}" for g in here if microbatch.groups[g].trained]
        names += [f"update.{at}" for at in self.updated_on_device(microbatch)]
        ops = [graph.ops[graph.op_index[name]] for name in names]
        return ops if microbatch.ranks is None else list(_with_collectives(graph, ops))

    def updated_on_device(self, microbatch: Microbatch) -> list[int]:
        """Groups that the device updates though their state is on the host, in order."""
        if not self.device_updates or self.updates == "device":
            return []
        late = [at for layer in reversed(microbatch.layers) for at in layer.gives]
        added = set(late) if self.sums == "device" else set(self.kept_gradients)
        here = [at for at in late if self.state[at] == "host" and at in added]
        # The last ones of backward: on the host, nothing would hide their updates.
        return here[-self.device_updates :]

    def state_is_on_nvme(self, value: str) -> bool:
        kind, _, at = value.partition(".")
        return kind == "O" and self.state[int(at)] == "nvme"


def _with_collectives(graph: TrainingGraph, ops: Sequence[Op]) -> Iterator[Op]:
    """Each gather right before the first op that reads it, each reduction behind its gradient."""
    gathers = {op.outputs[0]: op for op in graph.ops if op.target == GATHER}
    reductions = {op.inputs[0]: op for op in graph.ops if op.target == REDUCE}
    for op in ops:
        yield from (gathers.pop(name) for name in op.inputs if name in gathers)
        yield op
        yield from (reductions[name] for name in op.outputs if name in reductions)


def full_recompute(microbatch: Microbatch) -> tuple[int, ...]:
    return tuple(
        min(range(len(layer.options)), key=lambda i: (layer.options[i].saved_bytes, i))
        for layer in microbatch.layers
    )


@dataclass(frozen=True)
class _NamedSystem:
    """A fixed config of the same step, which gives the same bits; state is on the host.

    `windows` : of which the least of the fastest is taken.
    """

    title: str
    source: str
    keeping: _Keeping
    sums: Tier = "host"
    windows: tuple[int, ...] = (0,)
    is_layer_major: bool = False

    def configs(self, microbatch: Microbatch, count: int) -> list[StepConfig]:
        # All compute a layer's inside again in backward, as they advise.
        options = full_recompute(microbatch)
        passes = (Pass(count, options),) if self.is_layer_major else (Pass(1, options),) * count
        state: tuple[Tier, ...] = ("host",) * len(microbatch.groups)
        one = StepConfig(passes, state, self.sums, keeping=self.keeping)
        return [msgspec.structs.replace(one, window=window) for window in self.windows]


NAMED_SYSTEMS = {
    # Parameters stay; gradients go down as they are made and are added there.
    "zero-offload": _NamedSystem(
        "ZeRO-Offload", "Ren et al. 2021, https://arxiv.org/abs/2101.06840", "stay"
    ),
    # All microbatches through a layer before the next: its parameters come once a way.
    "l2l": _NamedSystem(
        "L2L", "Pudipeddi et al. 2020, https://arxiv.org/abs/2002.05645", "stream", "device",
        is_layer_major=True,
    ),
    # As ZeRO-Offload, with parameters brought for each layer, ahead of its use.
    "zero-infinity": _NamedSystem(
        "ZeRO-Infinity", "Rajbhandari et al. 2021, https://arxiv.org/abs/2104.07857", "stream"
    ),
    # What a warm-up step saw used again soonest stays on the device.
    "patrickstar": _NamedSystem(
        "PatrickStar", "Fang et al. 2021, https://arxiv.org/abs/2108.05818", "near"
    ),
    # At most a few layers on the device at once, in a window that moves.
    "stronghold": _NamedSystem(
        "STRONGHOLD", "Sun et al. 2022, https://doi.org/10.1109/SC41404.2022.00076", "stream",
        windows=(1, 2, 3, 4, 6, 8),
    ),
}  # fmt: skip
"""By name. Elixir's choice of what stays is PatrickStar's here, and Mobius spreads a step over
several devices, which a graph of one has not. An update that is delayed, as ZeRO-Offload's may be,
steps with the gradients of the step before: it trains another run than eager's."""
