"""A whole optimizer step as a graph of single ops: those of a captured graph once a microbatch.

The graph of layers (`graph.py`) is what is searched over. This one is what runs, so its peak is
that of the step to the byte. Names: ``addmm_3.1`` is op or value ``addmm_3`` of microbatch 1. Of a
parameter ``primals_4``, ``G:primals_4`` is its gradient, ``O:primals_4`` its state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.graph_capture.links import Links
from remat.graph_capture.optimizer_step.graph import COMPUTE, GroupPlace
from remat.graph_capture.optimizer_step.microbatch import Microbatch
from remat.graph_capture.optimizer_step.update import ParameterUpdate, Update

TANGENTS = "remat.tangents"
"""Of the captured graph: the op that opens backward."""
FORWARD_ENDS, ADD, STEP = "remat.forward_ends", "remat.add_gradient", "remat.parameter_step"
"""Targets: a microbatch's results are taken, a gradient is added, the optimizer steps once."""


@dataclass(frozen=True)
class OpByOp:
    """The ops and values of one step of `count` microbatches.

    Attributes
    ----------
    captured : the graph of one batch. microbatch : its layers. places : of each of its groups.
    updates : by the captured name of each trained parameter, what its update takes.
    """

    captured: TrainingGraph
    microbatch: Microbatch
    places: Sequence[GroupPlace]
    update: Update
    updates: Mapping[str, ParameterUpdate]
    count: int

    @cached_property
    def gradient_of(self) -> dict[str, str]:
        """By trained parameter, its gradient in the captured graph."""
        groups = self.microbatch.groups
        return {p: g for group in groups for p, g in group.gradient_of.items() if g}

    @cached_property
    def parameter_of(self) -> dict[str, str]:
        """By gradient, its parameter."""
        return {gradient: parameter for parameter, gradient in self.gradient_of.items()}

    @cached_property
    def finished_by(self) -> dict[str, list[str]]:
        """By op of the captured graph, the parameters whose gradients it is the last to touch."""
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
        if not i and name in self.parameter_of:
            return f"G:{self.parameter_of[name]}"
        found = self.captured.value_by_name[name]
        return f"{name}.{i}" if found.producer and found.kind != "tangent" else name

    def graph(self, names: Sequence[str], links: Links | None) -> TrainingGraph:
        """The graph whose ops stand in the order of `names`, that of their first runs."""
        ops = {op.name: op for op in (*self._computations(), *self._additions(), *self._steps())}
        return TrainingGraph(
            name=self.captured.name,
            ops=tuple(ops[name] for name in names),
            values=tuple(self._values()),
            outputs=tuple(
                self.value(name, i)
                for i in range(self.count)
                for name in self.captured.forward_outputs
                if name in self.captured.outputs
            ),
            resident=msgspec.structs.replace(
                self.microbatch.resident,
                batch_bytes=self.count * self.microbatch.resident.batch_bytes,
            ),
            inputs=self.captured.inputs,
            device=self.captured.device,
            prices=self.captured.prices,
            links=links,
        )

    def _computations(self) -> Iterator[Op]:
        for i in range(self.count):
            for op in self.captured.ops:
                if op.target == TANGENTS:
                    given = tuple(self.value(v, i) for v in self.captured.forward_outputs)
                    yield Op(f"{op.name}.{i}", FORWARD_ENDS, COMPUTE, given, (), op.cost_us)
                    continue
                yield msgspec.structs.replace(
                    op,
                    name=f"{op.name}.{i}",
                    phase=COMPUTE,
                    inputs=tuple(dict.fromkeys(self.value(v, i) for v in op.inputs)),
                    outputs=tuple(self.value(v, i) for v in op.outputs),
                    checkpoint=0,
                )

    def _additions(self) -> Iterator[Op]:
        sizes = self.captured.value_by_name
        for i in range(1, self.count):
            for parameter, gradient in self.gradient_of.items():
                size_bytes = sizes[gradient].size_bytes
                yield Op(
                    f"add:{parameter}.{i}", ADD, COMPUTE,
                    (f"G:{parameter}", self.value(gradient, i)), (),
                    3 * size_bytes / (self.update.device_gb_s * 1e3), price="modelled",
                    updates=(f"G:{parameter}",),
                )  # fmt: skip

    def _steps(self) -> Iterator[Op]:
        for group in self.microbatch.groups:
            if not group.trained:
                continue
            us_a_byte = self.update.device_us(group) / group.parameter_bytes
            for name in filter(group.gradient_of.get, group.gradient_of):
                found = self.updates[name]
                state = (f"O:{name}",) if found.state_bytes else ()
                yield Op(
                    f"update:{name}", STEP, "update", (f"G:{name}", *state, name), (),
                    us_a_byte * self.captured.value_by_name[name].size_bytes,
                    found.workspace_bytes, module=group.name, price="modelled",
                    updates=(*state, name),
                )  # fmt: skip

    def _values(self) -> Iterator[Value]:
        """What is there before the step, states, and what ops make."""
        homes = {
            name: place.parameters
            for group, place in zip(self.microbatch.groups, self.places, strict=True)
            for name in group.gradient_of
        }
        for value in self.captured.values:
            if value.kind == "tangent" or not value.producer:
                kind = "input" if value.kind == "tangent" else value.kind
                yield msgspec.structs.replace(
                    value, producer="", kind=kind, home=homes.get(value.name), held_until="",
                    written_over="",
                )  # fmt: skip
        for group, place in zip(self.microbatch.groups, self.places, strict=True):
            for name in group.gradient_of:
                found = self.updates.get(name)
                if found and found.state_bytes and group.gradient_of[name]:
                    yield Value(f"O:{name}", found.state_bytes, kind="optimizer", home=place.state)
        for value in self.captured.values:
            if value.producer and value.kind != "tangent":
                for i in range(self.count):
                    yield msgspec.structs.replace(
                        value, name=self.value(value.name, i), producer=f"{value.producer}.{i}",
                        held_until="", written_over="",
                    )  # fmt: skip
