"""Inductor's joint graph as a `TrainingGraph` of kernels and calls, and a schedule of it as graphs.

Pointwise nodes take no storage in their readers, but where these would hold too much (`stored`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.distributed.collectives import (
    ALL_RANKS_RUN,
    is_collective,
    is_wait,
    wait_nodes,
)
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import TANGENTS, Kind, Op, Phase, Resident, TrainingGraph, Value
from remat.graph_capture.joint.nodes import (
    draws_randomness,
    is_custom,
    is_getitem,
    is_tangent,
    mutates,
    node_inputs,
    storage_key,
    target_name,
    tensors_of,
)
from remat.graph_capture.joint.output_aliasing import why_custom
from remat.graph_capture.torch_private.inductor import REALIZE
from remat.rewriter.graphs.emitter import Demand, Emitter, as_module, emit_both
from remat.rewriter.inductor.fused_nodes import (
    SEEDS,
    StoredNodes,
    is_generated,
    is_inlined,
    makers,
    module_and_line,
    refuse_symbols,
    shares_storage,
)
from remat.schedules.schedule import Compute, Free, Schedule


@dataclass
class FusedJoint:
    """A training graph of kernels together with the fx nodes that its names stand for."""

    module: fx.GraphModule
    n_outputs: int
    graph: TrainingGraph
    node_of_op: dict[str, fx.Node]
    base_of_value: dict[str, fx.Node]  # the node that first returns it
    values_read: dict[fx.Node, tuple[str, ...]]  # live where a node is emitted


class _Builder:
    def __init__(self, gm: fx.GraphModule, n_outputs: int, overwritten: Collection[str]) -> None:
        self.gm, self.n_outputs = gm, n_outputs
        self.values: dict[str, Value] = {}
        self.base: dict[str, fx.Node] = {}
        self.values_read: dict[fx.Node, tuple[str, ...]] = {}
        self.node_of_op: dict[str, fx.Node] = {}
        self.ops: dict[Phase, list[Op]] = {"forward": [], "backward": []}
        self.nodes = list(self.gm.graph.nodes)
        results: Any = self.nodes[-1].args[0]
        self.forward_results = [n for n in results[: self.n_outputs] if isinstance(n, fx.Node)]
        self.gradients = [n for n in results[self.n_outputs :] if isinstance(n, fx.Node)]
        written = {n.args[0] for n in self.nodes if mutates(n)}
        self.overwritten = {n for n in self.nodes if n.name in overwritten} | written
        self.in_forward = self._forward_nodes()
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in reversed(self.nodes):
            readers = [found[user] if shares_storage(user) else [user] for user in node.users]
            found[node] = [reader for several in readers for reader in several]
        self.stored = StoredNodes(self.nodes, self.in_forward, found)

    def _forward_nodes(self) -> set[fx.Node]:
        """Ancestors of forward's results and of what draws or has effects there; their parts."""
        late = {node for node in self.nodes if is_tangent(node)}
        for node in self.nodes:
            if any(source in late for source in node.all_input_nodes):
                late.add(node)
        effects = [
            n for n in self.nodes
            if n.op == "call_function" and n not in late
            and (
                draws_randomness(n) or mutates(n) or n.target == SEEDS or is_collective(n)
                or is_custom(n) or not self.overwritten.isdisjoint(n.all_input_nodes)
            )
        ]  # fmt: skip
        found = makers([*self.forward_results, *effects])
        # Backward alone reads some, such as a dropout's mask.
        return found | {n for n in self.nodes if is_getitem(n) and n.args[0] in found}

    def build(self, name: str, resident: Resident, device: str) -> FusedJoint:
        self._add_inputs()
        for node in self.nodes:
            if node.op == "call_function":
                self._add(node)
        kept = self._names(n for n in self.forward_results if n not in self.overwritten)
        tangents = [v.name for v in self.values.values() if v.kind == "tangent"]
        ends = (*kept, *self._names(self.gradients), *tangents)
        graph = TrainingGraph(
            name=name, ops=(*self.ops["forward"], *self.ops["backward"]),
            values=tuple(self.values.values()), forward_outputs=tuple(dict.fromkeys(kept)),
            outputs=tuple(dict.fromkeys(ends)), resident=resident, device=device,
        )  # fmt: skip
        nodes = self.node_of_op, self.base, self.values_read
        return FusedJoint(self.gm, self.n_outputs, graph, *nodes)

    def _names(self, nodes: Iterable[fx.Node]) -> list[str]:
        names = [name for node in nodes for name in self.values_read[node]]
        return [name for name in names if self.values[name].producer]

    def _add_inputs(self) -> None:
        storages: dict[int, str] = {}
        tangents: list[str] = []
        for node in self.nodes:
            if node.op not in ("placeholder", "get_attr"):
                continue
            tensor = node.meta.get("val")
            self.values_read[node] = ()
            if not isinstance(tensor, Tensor):
                continue
            key = storage_key(tensor)
            if key not in storages:  # inputs of one storage are one value
                storages[key] = node.name
                is_late = is_tangent(node)
                kind: Kind = "tangent" if is_late else "input"
                self._register(node, node, tensor, "tangents" if is_late else "", kind)
                if is_late:
                    tangents.append(node.name)
            self.values_read[node] = (storages[key],)
        made, pin = tuple(tangents), "its results arrive from autograd"
        opening = Op("tangents", TANGENTS, "backward", (), made, no_recompute=pin)
        self.ops["backward"].append(opening)

    def _register(
        self, node: fx.Node, base: fx.Node, tensor: Tensor, producer: str, kind: Kind
    ) -> None:
        self.base[node.name] = base
        self.values[node.name] = Value(
            name=node.name, size_bytes=tensor.untyped_storage().nbytes(), producer=producer,
            kind=kind, dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(int(n) for n in tensor.shape),
        )  # fmt: skip

    def _read(self, node: fx.Node) -> tuple[str, ...]:
        read = (value for one in node_inputs(node) for value in self.values_read.get(one, ()))
        return tuple(dict.fromkeys(read))

    def _add(self, node: fx.Node) -> None:
        if is_getitem(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            is_value = node.name in self.values  # of the op that made the tuple, or a view
            self.values_read[node] = (node.name,) if is_value else self.values_read[source]
        elif is_wait(node):
            names = self._read(node)
            self.values_read[node] = names
            # What was waited for stands for a collective's result, and is what may be saved.
            if len(names) == 1 and self.values[names[0]].producer:
                self.base[names[0]] = node
        elif shares_storage(node) or (is_inlined(node) and not self.stored.is_stored(node)):
            self.values_read[node] = self._read(node)
        else:
            self._add_op(node)

    def _add_op(self, node: fx.Node) -> None:
        phase: Phase = "forward" if node in self.in_forward else "backward"
        outputs: list[str] = []
        kind: Kind = "activation" if phase == "forward" else "gradient"
        if isinstance(node.meta.get("val"), (tuple, list)):
            tensors = tensors_of(node)
            for user in node.users:
                tensor = tensors[user.args[1]] if is_getitem(user) else None  # pyright: ignore
                if tensor is not None and user.name not in self.values:
                    self._register(user, user, tensor, node.name, kind)
                    outputs.append(user.name)
        elif isinstance(node.meta.get("val"), Tensor) and not mutates(node):
            self._register(node, node, node.meta["val"], node.name, kind)
            outputs.append(node.name)
        inputs = self._read(node)
        # What an op with effects returns is the value that it writes to.
        self.values_read[node] = tuple(outputs) if outputs else self._written(node)
        self.node_of_op[node.name] = node
        module, source = module_and_line(node)
        self.ops[phase].append(
            Op(
                node.name, target_name(node), phase, inputs, tuple(outputs),
                no_recompute=self._why_no_recompute(node, phase), module=module, source=source,
            )
        )  # fmt: skip

    def _written(self, node: fx.Node) -> tuple[str, ...]:
        first = node.args[0] if node.args else None
        return self.values_read[first] if mutates(node) and isinstance(first, fx.Node) else ()

    def _why_no_recompute(self, node: fx.Node, phase: Phase) -> str:
        reads = {self.base.get(name) for name in self._read(node)}
        if mutates(node):
            return "it has effects"
        if is_collective(node):
            return ALL_RANKS_RUN
        if reads & self.overwritten and phase == "forward":
            return "it reads an input that the step overwrites"
        if reads & self.overwritten:
            raise CaptureError(
                "give forward a copy, x.clone(), before the change: backward reads "
                f"{target_name(node)} of an input that forward overwrites "
                f"({module_and_line(node)[1]})"
            )
        if node.target == SEEDS or draws_randomness(node):
            return "it draws random numbers"
        if all(t is None for t in tensors_of(node)):
            return "it only has side effects"
        return why_custom(node)


def build_fused(
    gm: fx.GraphModule, n_outputs: int, name: str, resident: Resident, device: str,
    overwritten: Collection[str] = (),
) -> FusedJoint:  # fmt: skip
    """Analyse the joint graph to be partitioned, which reads copies of `overwritten` inputs."""
    for node in gm.graph.nodes:
        refuse_symbols(node)
    return _Builder(gm, n_outputs, overwritten).build(name, resident, device)


MOVED = frozenset({torch.ops.aten.mm.default})
"""Calls that Inductor makes one with an addition, and moves there: with tied weights one would hold
the logits' gradient to the end of backward."""


class _FusedEmitter(Emitter[FusedJoint]):
    """Emits inlined nodes right before their kernels; results of `lasting` outlive a call."""

    cannot_move = "which cannot be compiled"

    def __init__(self, joint: FusedJoint, demand: Demand, lasting: set[int]) -> None:
        super().__init__(joint, demand)
        self.lasting = lasting
        self.in_kernels: dict[fx.Node, fx.Node] = {}
        self.inlined: list[fx.Node] = []

    def put(self, node: fx.Node, copy: fx.Node, stored: fx.Node | None = None) -> None:
        super().put(node, copy)
        self.in_kernels[node] = stored or copy

    def forget(self, node: fx.Node) -> None:
        super().forget(node)
        self.in_kernels.pop(node, None)

    def values_behind(self, node: fx.Node) -> tuple[str, ...]:
        # Of inlined nodes too: a copy that outlived one of these would keep it alive in Inductor.
        return self.joint.values_read.get(node, ())

    def resolve(self, node: fx.Node, in_kernel: bool = False) -> fx.Node:
        copies = self.in_kernels if in_kernel else self.copies
        if node not in copies:
            if (entered := self.entering(node)) is not None:
                self.put(node, entered)
            elif shares_storage(node):
                copies[node] = self._copy(node, in_kernel)
                self.note_copied(node)
                self.inlined.append(node)
            else:
                self.put(node, self._copy(node, in_kernel=True))
                self.inlined.append(node)
        return copies[node]

    def compute(self, op: Op) -> None:
        if op.target == TANGENTS:
            return
        node = self.joint.node_of_op[op.name]
        copy = self._copy(node, in_kernel=is_generated(node))
        if not is_generated(node):
            for inlined in self.inlined:  # Inductor stores what is read on both sides of a call
                self.forget(inlined)
            self.inlined.clear()
        if isinstance(node.meta.get("val"), (tuple, list)):
            for part in node.users:
                if is_getitem(part) and part not in self.copies:
                    args = copy, part.args[1]
                    self.put(part, self.call(part.target, args, {}, None, part.meta))
                    self._wait(part)
        else:
            self.put(node, copy, self._stored(node, copy) if self.at in self.lasting else None)
            self._wait(node)

    def _wait(self, made: fx.Node) -> None:
        for wait in wait_nodes(made):  # a collective's result is what was waited for
            self.put(wait, self._copy(wait, in_kernel=False))

    def _copy(self, node: fx.Node, in_kernel: bool) -> fx.Node:
        return self.copy_of(node, node.name, lambda read: self.resolve(read, in_kernel))

    def _stored(self, node: fx.Node, copy: fx.Node) -> fx.Node | None:
        if not is_inlined(node) and node.target not in MOVED:  # the rest is stored anyway
            return None
        return self.call(REALIZE, (copy,), {}, None, node.meta)  # so Inductor stores it here


def emit_fused(joint: FusedJoint, schedule: Schedule) -> tuple[fx.GraphModule, fx.GraphModule]:
    schedule.check_made_for(joint.graph)
    lasting = _lasting_steps(joint, schedule)

    def start(demand: Demand, left_live: frozenset[str]) -> _FusedEmitter:
        return _FusedEmitter(joint, demand, lasting)

    forward, backward = emit_both(joint, schedule, joint.n_outputs, start)
    return as_module(joint, forward), as_module(joint, backward)


def _lasting_steps(joint: FusedJoint, schedule: Schedule) -> set[int]:
    calls = {name for name, node in joint.node_of_op.items() if not is_generated(node)}
    ops, index = joint.graph.ops, joint.graph.op_index
    made_at: dict[str, int] = {}
    lasting: set[int] = set()
    for i, step in enumerate(schedule.steps):
        if isinstance(step, Free):
            made_at.pop(step.value, None)
        elif isinstance(step, Compute):
            op = ops[index[step.op]]
            if op.name in calls:
                lasting.update(made_at.values())  # live while a later call runs
            made_at.update({value: i for value in op.outputs if value not in made_at})
    return lasting
