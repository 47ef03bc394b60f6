"""From AOTAutograd's joint fx graph to a `TrainingGraph`, and the way back to its nodes.

Ops that are ours, not torch's, so that the simulator needs no special case: `TANGENTS`, whose
results are what autograd passes in; `SAVE_RNG` before each op that draws, with a value that is kept
as long as that op may run again; `STATISTICS`, a batch norm's running statistics, so that the
normalisation may run again; `ACCUMULATE` and `UPDATE`, which release gradients in backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import fx

from remat.graph_capture.devices.known_devices import CUDA
from remat.graph_capture.distributed.collectives import is_wait, with_returned_run_once
from remat.graph_capture.distributed.dtensors import is_mesh
from remat.graph_capture.graph import TANGENTS, Op, Phase, Resident, TrainingGraph, Value
from remat.graph_capture.joint.autocast_cache import cached_casts
from remat.graph_capture.joint.eager_memory import held_until, with_checkpoints, written_over
from remat.graph_capture.joint.exact_ops import (
    MEAN,
    RECOMPUTED_BY,
    make_class_weights_exact,
    make_dropout_exact,
    make_products_exact,
    makes_statistics,
    run_by_kernels_of_eager,
)
from remat.graph_capture.joint.gradients import (
    GradientAccumulation,
    GradientRelease,
    lay_out_gradients,
    of_parameters,
)
from remat.graph_capture.joint.in_place_ops import join_writes, read_past_copies
from remat.graph_capture.joint.in_place_writes import BEGUN, InPlace, writes_in_place
from remat.graph_capture.joint.nodes import (
    NodeOrigins,
    drawn_on,
    draws_randomness,
    forward_nodes,
    is_alias_of_input,
    is_getitem,
    storage_key,
    target_name,
    tensors_of,
)
from remat.graph_capture.joint.output_aliasing import overwritten_values, why_no_recompute
from remat.graph_capture.joint.values import ValueTable
from remat.graph_capture.refusals import refuse_op

SAVE_RNG, STATISTICS = "remat.save_rng_state", "remat.statistics"


@dataclass
class Joint:
    """A training graph, still without costs, and the fx nodes that its names stand for."""

    module: fx.GraphModule
    num_forward_outputs: int
    graph: TrainingGraph
    node_of_op: dict[str, fx.Node]  # absent are the ops that are ours
    value_of_node: dict[fx.Node, str]
    base_of_value: dict[str, fx.Node]  # the first to return a value; absent if nothing reads it
    in_place: InPlace
    accumulations: dict[str, tuple[int, ...]]  # places among backward's results, by releasing op
    timed_hash: str  # of the graph whose gradients are returned together


@dataclass
class _Builder:
    gm: fx.GraphModule
    num_forward_outputs: int
    several_gradients: Mapping[int, int]
    released: Mapping[int, fx.Node] = field(default_factory=dict[int, fx.Node])
    gradient_release: GradientRelease | None = None
    node_of_op: dict[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    forward: list[Op] = field(default_factory=list[Op])
    backward: list[Op] = field(default_factory=list[Op])

    def __post_init__(self) -> None:
        read_past_copies(self.gm.graph)  # first, as it changes what nodes read
        self.nodes = list(self.gm.graph.nodes)
        self.values = ValueTable(self.gm)
        self.places = NodeOrigins(self.gm.graph)
        outputs, n = self.nodes[-1].args[0], self.num_forward_outputs
        assert isinstance(outputs, (tuple, list))
        self.forward_results, how = list(outputs[:n]), self.gradient_release or GradientRelease()
        self.accumulations = GradientAccumulation(outputs[n:], self.released, how)
        descriptions = self.nodes[-1].meta["desc"][:n]
        self.overwritten_inputs = [getattr(what, "mutated_input", None) for what in descriptions]
        self.in_forward = forward_nodes(self.nodes, self.forward_results)
        self.in_place = writes_in_place(self.nodes, self.in_forward)
        join_writes(self.gm.graph, self.in_forward, self.in_place)
        self.nodes = list(self.gm.graph.nodes)  # joining erased some
        self.overwritten = overwritten_values(self.nodes, self.overwritten_inputs)

    def build(self, name: str, resident: Resident, **facts: Any) -> Joint:
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.values.add_resident(node)
        tangents = self.values.add_tangents(self.nodes, self.several_gradients)
        pin = "its results arrive from autograd"
        self.backward.append(Op("tangents", TANGENTS, "backward", (), tangents, no_recompute=pin))
        for node in self.nodes:
            if node.op == "call_function":
                self._add_call(node)
        backward = self.accumulations.added_to(self.backward, self.values)
        # Only now, as `added_to` settles which gradients are released before the end.
        given, ends = self._ends(tangents, self.accumulations.returned())
        ops = (*with_checkpoints(self.forward, self.node_of_op), *backward)
        ops = with_returned_run_once(ops, self.node_of_op, (*given, *ends))
        casts = list(cached_casts(ops, self.node_of_op))
        held = held_until(ops, self.node_of_op, self.values.of_node, casts)
        for value in held.keys() - set(ends):  # what is live at the end is held as long in any case
            self.values.changed(value, held_until=held[value])
        made_as = {name: i for i, name in enumerate(self.values.by_name)}
        for value, over in written_over(self.values.of_node, casts, made_as).items():
            self.values.changed(value, written_over=over)
        buffers_bytes = resident.buffers_bytes + sum(self.values.constants_bytes.values())
        graph = TrainingGraph(
            name=name, ops=ops, values=tuple(self.values.by_name.values()), forward_outputs=given,
            outputs=ends, resident=replace(resident, buffers_bytes=buffers_bytes), **facts,
        )  # fmt: skip
        return Joint(
            self.gm, self.num_forward_outputs, graph,
            self.node_of_op, self.values.of_node, self.values.base_of, self.in_place,
            self.accumulations.of_op, self._timed_hash(graph, tangents),
        )  # fmt: skip

    def _timed_hash(self, graph: TrainingGraph, tangents: tuple[str, ...]) -> str:
        if not self.accumulations.of_op:  # where nothing is released, the step is timed as it is
            return graph.hash
        # A step is timed with its gradients returned together: its time is kept under that graph.
        given, ends = self._ends(tangents, self.accumulations.gradients)
        ops = (*self.forward, *self.backward)
        ops = with_returned_run_once(ops, self.node_of_op, (*given, *ends))
        return replace(graph, ops=ops, outputs=ends).hash

    def _ends(
        self, tangents: tuple[str, ...], returned: Sequence[Any]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        given = self.values.made_by_ops(self.forward_results)
        # AOTAutograd copies new values into buffers when forward ends, so they need not be live
        # longer. All else that forward returns is in the caller's hands.
        pairs = zip(self.forward_results, self.overwritten_inputs, strict=True)
        kept = self.values.made_by_ops(result for result, over in pairs if over is None)
        for name in kept:
            self.values.changed(name, kind="output")
        gradients = self.values.made_by_ops(returned)
        # A gradient that is written in place is done only with its last write.
        gradients += self.values.writes_before(gradients, "backward")
        ends = (*kept, *gradients, *tangents)  # autograd's engine holds the tangents to the end
        return tuple(dict.fromkeys(given)), tuple(dict.fromkeys(ends))

    def _add_call(self, node: fx.Node) -> None:
        if is_mesh(node):
            return
        refuse_op(node, self.places.of)
        if node in self.in_place.targets:
            phase, inputs = self._phase_and_inputs(node)
            token = self.values.add_write((node, *self.in_place.scattered[node]), phase)
            why = self.in_place.why_no_recompute(node)
            self._append(node, phase, inputs, (token,), why, self.places.of(node))
        # Scatters that put a written part back: in place, there is nothing to put back.
        if node in self.in_place.targets or node in self.in_place.before:
            return
        keys = {storage_key(t) for t in tensors_of(node) if t is not None}
        if is_getitem(node) or is_alias_of_input(node) or is_wait(node):
            self._add_name(node)
        elif keys and keys <= self.values.of_storage.keys():
            if len(keys) == 1:  # a view creates no storage: replayed where it is needed
                self.values.of_node[node] = self.values.of_storage[keys.pop()]
        else:
            self._add_op(node)

    def _phase_and_inputs(self, node: fx.Node) -> tuple[Phase, tuple[str, ...]]:
        phase: Phase = "forward" if node in self.in_forward else "backward"
        read = self.values.read_by(node)
        return phase, (*read, *self.values.writes_before(read, phase))

    def _append(
        self, node: fx.Node, phase: Phase, inputs: tuple[str, ...], outputs: tuple[str, ...],
        no_recompute: str, place: tuple[str, str], workspace_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.node_of_op[node.name] = node
        ops = self.forward if phase == "forward" else self.backward
        ops.append(
            Op(
                node.name, target_name(node), phase, inputs, outputs,
                workspace_bytes=workspace_bytes, no_recompute=no_recompute,
                module=place[0], source=place[1],
            )
        )  # fmt: skip

    def _add_name(self, node: fx.Node) -> None:
        values = self.values
        tensors = [t for t in tensors_of(node) if t is not None]
        source = node.args[0]
        assert isinstance(source, fx.Node)
        repeats = is_alias_of_input(node) or is_wait(node)
        known = values.of(source) if repeats else ""  # a getitem's source may have several
        if not known and tensors:
            known = values.of_storage[storage_key(tensors[0])]
        if repeats:
            values.of_storage[storage_key(tensors[0])] = known
        values.of_node[node] = known
        if is_getitem(node) and source.name in self.node_of_op:
            values.base_of.setdefault(known, node)
        if is_wait(node) and known:
            values.base_of[known] = node  # until the wait, it is being written

    def _add_op(self, node: fx.Node) -> None:
        place, workspace_bytes = self.places.of(node), 0
        phase, inputs = self._phase_and_inputs(node)
        outputs = self.values.add_outputs(node, phase)
        no_recompute = why_no_recompute(node, phase, inputs, self.overwritten, place)
        if phase == "forward" and draws_randomness(node):
            state = self._add_rng_state(node, *place)
            inputs = (*inputs, state)
            # A run that draws again holds the generator's present state, to put it back.
            workspace_bytes = self.values.by_name[state].size_bytes
        statistics: Op | None = None
        if makes_statistics(node):
            inputs, outputs, statistics = self._split_batch_norm(node, outputs, *place)
            no_recompute = ""  # only the statistics' update, its own op, must run once
        if node in self.in_place.begins:
            # Tensors after the writes are laid out as this view, so it stands for the value.
            self.values.base_of[outputs[0]] = self.in_place.begins[node]
        # Made again, it would lack what was written to it since.
        if any(made in self.in_place.begins for made in (node, *filter(is_getitem, node.users))):
            no_recompute = no_recompute or BEGUN
        self._append(node, phase, inputs, outputs, no_recompute, place, workspace_bytes)
        if statistics is not None:
            (self.forward if phase == "forward" else self.backward).append(statistics)

    def _add_rng_state(self, node: fx.Node, module: str, source: str) -> str:
        name = f"rng_state_{node.name}"
        size = rng_state_bytes(drawn_on(node))
        self.values.by_name[name] = Value(name, size, name, "rng_state", "uint8", (size,))
        self.forward.append(
            Op(
                name, SAVE_RNG, "forward", (), (name,),
                no_recompute="it saves the random stream where it stands",
                module=module, source=source,
            )
        )  # fmt: skip
        return name

    def _split_batch_norm(
        self, node: fx.Node, outputs: tuple[str, ...], module: str, source: str
    ) -> tuple[tuple[str, ...], tuple[str, ...], Op]:
        # The running statistics are left to the update: training normalises by those of the batch.
        read = [a for a in node.args[:3] if isinstance(a, fx.Node)]
        running = [a for a in node.args[3:5] if isinstance(a, fx.Node)]
        name = f"{node.name}_statistics"
        _, n_results = RECOMPUTED_BY[node.target]
        results, updates = outputs[:n_results], outputs[n_results:]
        for update, before in zip(updates, running, strict=True):
            over = self.values.of(before)
            self.values.changed(update, producer=name, kind="buffer", written_over=over)
        statistics = Op(
            name, STATISTICS, "forward", (results[MEAN], *map(self.values.of, running)), updates,
            no_recompute="it updates running statistics", module=module, source=source,
        )  # fmt: skip
        return tuple(dict.fromkeys(map(self.values.of, read))), results, statistics


def rng_state_bytes(device: torch.device) -> int:
    # A CUDA generator's state is 16 bytes on the host, so it takes nothing on the device.
    return 0 if device.type == CUDA else torch.get_rng_state().nbytes


def build_joint(
    gm: fx.GraphModule, num_forward_outputs: int, name: str, resident: Resident,
    several_gradients: Mapping[int, int] | None = None,
    gradient_release: GradientRelease | None = None, *, runs_here: bool = True, **facts: Any,
) -> Joint:  # fmt: skip
    """Storages become values, nodes ops, views nothing. `gm` is changed to run eager's ops.
    CaptureError if it mutates a tensor, or uses one whose gradient would be lost."""
    if runs_here:  # traced otherwise than eager runs them on a CPU, in the last bits
        make_dropout_exact(gm)
    make_class_weights_exact(gm)
    make_products_exact(gm)
    run_by_kernels_of_eager(gm)
    released = of_parameters(gm, num_forward_outputs) if gradient_release else {}
    # Autograd copies no gradient that it adds to what .grad holds.
    is_added = gradient_release is not None and gradient_release.is_added
    lay_out_gradients(gm, num_forward_outputs, released if is_added else ())
    builder = _Builder(gm, num_forward_outputs, several_gradients or {}, released, gradient_release)
    return builder.build(name, resident, **facts)
