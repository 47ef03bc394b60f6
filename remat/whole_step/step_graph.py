"""The graph of a whole optimizer step: ops a microbatch and layer, then an update of each group.

Parameters W, gradients G and the optimizer's state O are values of the graph, each with the tier
that it is in between steps. Where an update or a sum runs, and when anything moves, is the
schedule's choice. Names: ``forward.2.0`` is layer 2 of microbatch 0, ``W.3`` the parameters of
group 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import msgspec
from msgspec.structs import replace

from remat.graph_capture.distributed.sharding import GATHER, REDUCE
from remat.graph_capture.errors import GraphError
from remat.graph_capture.graph import TANGENTS, Links, Op, Phase, Tier, TrainingGraph, Value
from remat.whole_step.microbatch import Layer, Microbatch, ParameterUpdate, Update
from remat.whole_step.rank_share import shard_bytes

_COMPUTE: Phase = "forward"
"""Phase of all forward and backward ops of the whole step.

The end of forward is where one call ends and another begins, and what is live there is saved. A
whole step is one call, with as many forwards and backwards as microbatches, so it has no such
place. Named ``backward``, those of the first microbatch would have to wait for the last forward.
"""

GROUP_UPDATE, HOST_SUM = "remat.group_update", "remat.host_sum"
"""Targets of the optimizer's step of a group, and of a gradient's addition to the sum below."""


class GroupPlace(msgspec.Struct, frozen=True):
    """Where a group is between steps, and where its gradients are added.

    `parameters`, `state` : tiers of W and of O. `sums` : ``device`` where each backward adds into
    one G, which may move in between; ``host`` where each makes its own G and the host adds it.
    """

    parameters: Tier
    state: Tier
    sums: Tier = "device"


_Options = Sequence[tuple[int, ...]]  # by microbatch, the option of each layer


def optimizer_step(
    microbatch: Microbatch, update: Update, options: _Options, places: Sequence[GroupPlace],
    links: Links | None, passes: Sequence[int] = (),
) -> TrainingGraph:  # fmt: skip
    """`passes` : microbatches that go through each layer together; left out, each by itself."""
    if not options:
        raise GraphError("give one microbatch or more: there is none")
    numbers = {len(one) for one in options}
    if numbers != {len(microbatch.layers)} or len(places) != len(microbatch.groups):
        raise GraphError(
            "give an option for each layer of each microbatch, and a place for each group: the "
            f"step has {len(microbatch.layers)} layers and {len(microbatch.groups)} groups"
        )
    pass_of = [at for at, count in enumerate(passes) for _ in range(count)]
    made = _Made(microbatch, update, options, places, pass_of or range(len(options)))
    return TrainingGraph(
        name=microbatch.name, ops=(*made.computations(), *made.sums(), *made.updates()),
        values=tuple(made.values()),
        outputs=tuple(f"{name}.{i}" for i in range(made.count) for name in microbatch.outputs),
        resident=microbatch.resident_of(made.count), inputs=microbatch.inputs,
        device=microbatch.device, cost_origin=microbatch.cost_origin, links=links,
    )  # fmt: skip


class _Made:
    """Ops and values of one step, in an order in which they can run."""

    def __init__(
        self, microbatch: Microbatch, update: Update, options: _Options,
        places: Sequence[GroupPlace], pass_of: Sequence[int],
    ) -> None:  # fmt: skip
        self.microbatch, self.update, self.pass_of = microbatch, update, pass_of
        self.options, self.places, self.count = options, places, len(options)
        self.size: dict[str, int] = {}
        self.producer: dict[str, str] = {}

    def computations(self) -> Iterator[Op]:
        layers = list(enumerate(self.microbatch.layers))
        # In the order of microbatches, as eager adds gradients: sums have its bits if the schedule
        # keeps that order.
        for i in range(self.count):
            for at, layer in layers:
                yield from self._gathers(at, layer, "forward", i)
                yield self._turn(at, layer, i) if layer.turns else self._forward(at, layer, i)
                yield from self._reductions(layer, i) if layer.turns else ()
            for at, layer in reversed(layers):
                if not layer.turns:
                    yield from self._gathers(at, layer, "backward", i)
                    yield self._backward(at, layer, i)
                    yield from self._reductions(layer, i)

    def _weights(self, at: int, layer: Layer, phase: str, i: int) -> tuple[str, ...]:
        """What an op reads of its groups: with several ranks, what was gathered for the layer."""
        if (ranks := self.microbatch.ranks) is None:
            return tuple(f"W.{group}" for group in layer.groups)
        when = f"{self.pass_of[i]}" if ranks.keeps_whole else f"{self.pass_of[i]}.{phase}.{at}"
        return tuple(f"A.{group}.{when}" for group in layer.groups)

    def _gathers(self, at: int, layer: Layer, phase: str, i: int) -> Iterator[Op]:
        ranks, wholes = self.microbatch.ranks, self._weights(at, layer, phase, i)
        for which, whole in zip(layer.groups, wholes, strict=True):
            # Microbatches of a pass share it, with `keeps_whole` both phases do.
            if ranks is None or whole in self.producer:
                continue
            group, name = self.microbatch.groups[which], f"gather.{whole[2:]}"
            self._made_by(name, whole, group.whole_parameter_bytes)
            yield Op(
                name, GATHER, _COMPUTE, (f"W.{which}",), (whole,),
                ranks.gather_us(group.whole_parameter_bytes), module=group.name,
                cost_origin="modelled",
            )  # fmt: skip

    def _reductions(self, layer: Layer, i: int) -> Iterator[Op]:
        if (ranks := self.microbatch.ranks) is None:
            return
        for which in layer.gives:
            group, name = self.microbatch.groups[which], f"reduce.{which}.{i}"
            is_added = i > 0 and self.places[which].sums == "device"
            total, cost_us = f"G.{which}", ranks.reduce_us(group.whole_gradient_bytes)
            if is_added:
                cost_us += self.update.add_us(group.gradient_bytes, on_host=False)
            else:
                self._made_by(name, f"{total}.{i}" if i else total, group.gradient_bytes)
            yield Op(
                name, REDUCE, _COMPUTE,
                (f"D.{which}.{i}", *((total,) if is_added else ())),
                () if is_added else (f"{total}.{i}" if i else total,), cost_us,
                # The shard is there before it is added.
                group.gradient_bytes if is_added else 0, module=group.name,
                cost_origin="modelled", updates=(total,) if is_added else (),
            )  # fmt: skip

    def sums(self) -> Iterator[Op]:
        for at, group in enumerate(self.microbatch.groups):
            if self.places[at].sums == "device" or not group.trained:
                continue
            there_us, host_us = (
                self.update.add_us(group.gradient_bytes, on_host=on_host)
                for on_host in (False, True)
            )
            for i in range(1, self.count):
                yield Op(
                    f"sum.{at}.{i}", HOST_SUM, "update", (f"G.{at}", f"G.{at}.{i}"), (), there_us,
                    module=group.name, cost_origin="modelled", host_cost_us=host_us,
                    updates=(f"G.{at}",),
                )  # fmt: skip

    def updates(self) -> Iterator[Op]:
        for at, group in enumerate(self.microbatch.groups):
            if not group.trained:
                continue
            state = (f"O.{at}",) if self.update.state_bytes(group) else ()
            # Sums have eager's bits on device and host. Updates may not: a kernel may fuse a
            # product and a sum, which is unknown for a host beside a GPU.
            yield Op(
                f"update.{at}", GROUP_UPDATE, "update", (f"G.{at}", *state, f"W.{at}"), (),
                self.update.device_us(group), group.update_workspace_bytes, module=group.name,
                cost_origin="modelled", host_cost_us=self.update.host_us(group),
                updates=(*state, f"W.{at}"),
            )  # fmt: skip

    def values(self) -> Iterator[Value]:
        placed = zip(self.microbatch.groups, self.places, strict=True)
        for at, (group, place) in enumerate(placed):
            yield Value(f"W.{at}", group.parameter_bytes, kind="parameter", home=place.parameters)
            state_bytes = self.update.state_bytes(group)
            if state_bytes:
                yield Value(f"O.{at}", state_bytes, kind="optimizer", home=place.state)
        for name, producer in self.producer.items():
            kind = "gradient" if name.startswith("G.") else "activation"
            yield Value(name, self.size[name], producer, kind)

    def _made_by(self, op: str, name: str, size_bytes: int) -> str:
        self.size[name], self.producer[name] = size_bytes, op
        return name

    def _crossing(self, op: str, names: tuple[str, ...], i: int) -> tuple[str, ...]:
        sizes = self.microbatch.sizes
        return tuple(self._made_by(op, f"{name}.{i}", sizes[name]) for name in names)

    def _forward(self, at: int, layer: Layer, i: int) -> Op:
        name, option = f"forward.{at}.{i}", layer.options[self.options[i][at]]
        made = self._crossing(name, layer.makes, i)
        if option.saved_bytes:
            made = (*made, self._made_by(name, f"S.{at}.{i}", option.saved_bytes))
        return Op(
            name, "remat.layer_forward", _COMPUTE,
            (*self._weights(at, layer, "forward", i), *(f"{one}.{i}" for one in layer.reads)), made,
            layer.forward_us, option.forward_workspace_bytes, module=layer.name,
            cost_origin="modelled",
        )  # fmt: skip

    def _backward(self, at: int, layer: Layer, i: int) -> Op:
        option = layer.options[self.options[i][at]]
        saved = (f"S.{at}.{i}",) if option.saved_bytes else ()
        reads = tuple(f"{one}.{i}" for one in dict.fromkeys((*layer.reads, *layer.back_reads)))
        return self._with_gradients(
            f"backward.{at}.{i}", "remat.layer_backward", layer, i,
            (*self._weights(at, layer, "backward", i), *reads, *saved),
            layer.back_makes, layer.backward_us + option.extra_us, option.backward_workspace_bytes,
        )  # fmt: skip

    def _turn(self, at: int, layer: Layer, i: int) -> Op:
        """Both phases of the last layer, which reads nothing between them from elsewhere."""
        option = layer.options[self.options[i][at]]
        return self._with_gradients(
            f"turn.{at}.{i}", "remat.layer_turn", layer, i,
            (*self._weights(at, layer, "forward", i), *(f"{one}.{i}" for one in layer.reads)),
            (*layer.makes, *layer.back_makes),
            layer.forward_us + layer.backward_us + option.extra_us, option.backward_workspace_bytes,
        )  # fmt: skip

    def _with_gradients(
        self, name: str, target: str, layer: Layer, i: int, reads: tuple[str, ...],
        makes: tuple[str, ...], cost_us: float, workspace_bytes: int,
    ) -> Op:  # fmt: skip
        """An op that makes gradients of parameters: its own, or added to those that are there."""
        made = self._crossing(name, makes, i)
        added = list[str]()
        for at in layer.gives:
            group, place = self.microbatch.groups[at], self.places[at]
            if self.microbatch.ranks is not None:  # it is whole until it is reduced
                made = (*made, self._made_by(name, f"D.{at}.{i}", group.whole_gradient_bytes))
                workspace_bytes -= group.whole_gradient_bytes
                continue
            # While it is added, the new gradient is part of the workspace.
            if i and place.sums == "device":
                added.append(f"G.{at}")
                continue
            gradient = f"G.{at}.{i}" if i else f"G.{at}"
            made = (*made, self._made_by(name, gradient, group.gradient_bytes))
            # Here the gradient is an output, not workspace.
            workspace_bytes -= group.gradient_bytes
        return Op(
            name, target, _COMPUTE, (*reads, *added), made, cost_us,
            max(workspace_bytes, 0), module=layer.name, cost_origin="modelled",
            updates=tuple(added),
        )  # fmt: skip


# Below: a step as a graph of single ops, those of a captured graph once a microbatch. The graph of
# layers is searched over; this one is what runs, so its peak is that of the step to the byte.
# Names: ``addmm_3.1`` is op or value ``addmm_3`` of microbatch 1. Of a parameter ``primals_4``,
# ``G:primals_4`` is its gradient, ``O:primals_4`` its state. With several ranks these are shards;
# ``A:primals_4`` is the whole parameter, which one op gathers again and again, and
# ``R:primals_4.1`` what microbatch 1 adds to the shard of the gradient.


FORWARD_ENDS, ADD, STEP = "remat.forward_ends", "remat.add_gradient", "remat.parameter_step"
"""Targets: a microbatch's results are taken, a gradient is added, the optimizer steps once."""


@dataclass(frozen=True)
class OpByOp:
    """The ops and values of one step of `count` microbatches, from the captured graph of one batch.

    `places` are of the groups of `microbatch`, `updates` by the captured name of each parameter.
    """

    captured: TrainingGraph
    microbatch: Microbatch
    places: Sequence[GroupPlace]
    update: Update
    updates: Mapping[str, ParameterUpdate]
    count: int

    @cached_property
    def gradient_of(self) -> dict[str, str]:
        return {p: group.gradient_of[p] for group in self.microbatch.groups for p in group.updated}

    @cached_property
    def parameter_of(self) -> dict[str, str]:
        return {gradient: parameter for parameter, gradient in self.gradient_of.items()}

    @cached_property
    def finished_by(self) -> dict[str, list[str]]:
        last = dict[str, str]()
        for op in self.captured.ops:
            for name in (*op.inputs, *op.outputs):
                if name in self.parameter_of:
                    last[self.parameter_of[name]] = op.name
        found = dict[str, list[str]]()
        for parameter, op in last.items():
            found.setdefault(op, []).append(parameter)
        return found

    def value(self, name: str, i: int) -> str:
        """The value of microbatch `i` that `name` stands for in the captured graph."""
        # On one rank, the first microbatch's gradient becomes the sum.
        if not i and name in self.parameter_of and self.microbatch.ranks is None:
            return f"G:{self.parameter_of[name]}"
        found = self.captured.value_by_name[name]
        # All microbatches share the tangent of the loss.
        return f"{name}.{i}" if found.producer and found.kind != "tangent" else name

    def read(self, name: str, i: int) -> str:
        """As `value`, of what an op reads: with several ranks, the whole parameter."""
        return f"A:{name}" if name in self._gathered else self.value(name, i)

    @cached_property
    def _gathered(self) -> set[str]:
        groups = self.microbatch.groups if self.microbatch.ranks is not None else ()
        return {name for group in groups for name in group.gradient_of}

    def _size(self, parameter: str, of: str = "") -> int:
        """Of what one rank holds of a parameter, or of its gradient, which is `of`."""
        typed = of or parameter
        if (ranks := self.microbatch.ranks) is None:
            return self.captured.value_by_name[typed].size_bytes
        return shard_bytes(ranks, self.captured, parameter, typed)

    def graph(self, names: Sequence[str], links: Links | None) -> TrainingGraph:
        """The graph whose ops stand in the order of `names`, that of their first runs."""
        made = self._computations(), self._collectives(), self._additions(), self._steps()
        ops = {op.name: op for op in chain(*made)}
        captured = self.captured
        given = [name for name in captured.forward_outputs if name in captured.outputs]
        return TrainingGraph(
            name=captured.name, ops=tuple(ops[name] for name in names),
            values=tuple(self._values()),
            outputs=tuple(self.value(name, i) for i in range(self.count) for name in given),
            resident=self.microbatch.resident_of(self.count), inputs=captured.inputs,
            device=captured.device, cost_origin=captured.cost_origin, links=links,
        )  # fmt: skip

    def _computations(self) -> Iterator[Op]:
        for i in range(self.count):
            for op in self.captured.ops:
                if op.target == TANGENTS:
                    # Here forward's results are returned, and backward begins.
                    given = tuple(self.value(v, i) for v in self.captured.forward_outputs)
                    yield Op(f"{op.name}.{i}", FORWARD_ENDS, _COMPUTE, given, (), op.cost_us)
                    continue
                yield replace(
                    op, name=f"{op.name}.{i}", phase=_COMPUTE,
                    inputs=tuple(dict.fromkeys(self.read(v, i) for v in op.inputs)),
                    outputs=tuple(self.value(v, i) for v in op.outputs),
                    checkpoint=0,  # the plan decides what reruns
                )  # fmt: skip

    def _collectives(self) -> Iterator[Op]:
        if (ranks := self.microbatch.ranks) is None:
            return
        sizes = self.captured.value_by_name
        for name in self._gathered:
            cost_us = ranks.gather_us(sizes[name].size_bytes)
            yield Op(f"gather:{name}", GATHER, _COMPUTE, (name,), (f"A:{name}",), cost_us)
        for i in range(self.count):
            for name, gradient in self.gradient_of.items():
                yield Op(
                    f"reduce:{name}.{i}", REDUCE, _COMPUTE, (self.value(gradient, i),),
                    (self.summand(name, i),), ranks.reduce_us(sizes[gradient].size_bytes),
                )  # fmt: skip

    def summand(self, parameter: str, i: int) -> str:
        """What a microbatch gives to the sum of gradients: the first's becomes the sum."""
        if self.microbatch.ranks is None:
            return self.value(self.gradient_of[parameter], i)
        return f"R:{parameter}.{i}" if i else f"G:{parameter}"

    def _additions(self) -> Iterator[Op]:
        for i in range(1, self.count):
            for parameter, gradient in self.gradient_of.items():
                yield Op(
                    f"add:{parameter}.{i}", ADD, _COMPUTE,
                    (f"G:{parameter}", self.summand(parameter, i)), (),
                    self.update.add_us(self._size(parameter, gradient), on_host=False),
                    cost_origin="modelled", updates=(f"G:{parameter}",),
                )  # fmt: skip

    def _steps(self) -> Iterator[Op]:
        for group in self.microbatch.groups:
            if not group.trained:
                continue
            # Share the group's time by bytes: updates are bound by memory.
            us_a_byte = self.update.device_us(group) / group.parameter_bytes
            for name in group.updated:
                found = self.updates[name]
                state = (f"O:{name}",) if found.state_bytes else ()
                yield Op(
                    f"update:{name}", STEP, "update", (f"G:{name}", *state, name), (),
                    us_a_byte * self._size(name),
                    found.workspace_bytes, module=group.name, cost_origin="modelled",
                    updates=(*state, name),
                )  # fmt: skip

    def _values(self) -> Iterator[Value]:
        homes = {
            name: place.parameters
            for group, place in zip(self.microbatch.groups, self.places, strict=True)
            for name in group.gradient_of
        }
        for value in self.captured.values:
            if value.kind == "tangent" or not value.producer:
                # The tangent of the loss is given, like an input.
                kind = "input" if value.kind == "tangent" else value.kind
                yield replace(
                    # It does not matter here how long eager holds a value.
                    value, producer="", kind=kind, home=homes.get(value.name), held_until="",
                    written_over="",
                    size_bytes=self._size(value.name) if value.name in homes else value.size_bytes,
                )  # fmt: skip
        yield from self._of_ranks()
        for group, place in zip(self.microbatch.groups, self.places, strict=True):
            for name in group.updated:
                found = self.updates.get(name)
                if found and found.state_bytes:
                    yield Value(f"O:{name}", found.state_bytes, kind="optimizer", home=place.state)
        for value in self.captured.values:
            if value.producer and value.kind != "tangent":
                for i in range(self.count):
                    yield replace(
                        value, name=self.value(value.name, i), producer=f"{value.producer}.{i}",
                        held_until="", written_over="",
                    )  # fmt: skip

    def _of_ranks(self) -> Iterator[Value]:
        for name in self._gathered:
            whole = self.captured.value_by_name[name]
            yield Value(f"A:{name}", whole.size_bytes, f"gather:{name}")
        for name, gradient in self.gradient_of.items() if self._gathered else ():
            for i in range(self.count):
                size_bytes, made = self._size(name, gradient), self.summand(name, i)
                yield Value(made, size_bytes, f"reduce:{name}.{i}", "gradient")
