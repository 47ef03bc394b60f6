"""From AOTAutograd's joint fx graph to a `TrainingGraph`, and the way back to its nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor, fx

from remat.graph_capture.devices.device_table import CUDA
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Kind, Op, Phase, Resident, TrainingGraph, Value
from remat.graph_capture.joint.batch_norm import (
    AGAIN,
    CHOSEN_BACKWARD,
    makes_statistics,
    run_by_kernels_of_eager,
)
from remat.graph_capture.joint.dropout import make_dropout_exact
from remat.graph_capture.joint.gradient_layout import lay_out_gradients
from remat.graph_capture.joint.nodes import (
    Places,
    argument,
    drawn_on,
    draws_randomness,
    is_alias_of_input,
    is_getitem,
    is_tangent,
    node_inputs,
    result_bytes,
    storage_key,
    target_name,
    tensors_of,
)
from remat.graph_capture.joint.refuse_ops import refuse_op

TANGENTS, SAVE_RNG, STATISTICS = "remat.tangents", "remat.save_rng_state", "remat.statistics"


@dataclass
class Joint:
    """A training graph together with the fx nodes that its names stand for.

    Attributes
    ----------
    module : the joint GraphModule. num_forward_outputs : of its outputs, the forward's.
    graph : torch-free facts, unpriced.
    node_of_op : fx node behind each op; absent for ops we add (tangents, RNG states,
        batch-norm statistics).
    value_of_node : name of the value a tensor node belongs to.
    base_of_value : the node that first returns a value; absent if nothing reads it.
    """

    module: fx.GraphModule
    num_forward_outputs: int
    graph: TrainingGraph
    node_of_op: dict[str, fx.Node]
    value_of_node: dict[fx.Node, str]
    base_of_value: dict[str, fx.Node]


@dataclass
class _Builder:
    gm: fx.GraphModule
    num_forward_outputs: int
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    by_storage: dict[int, str] = field(default_factory=dict[int, str])
    value_of_node: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    base_of_value: dict[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    node_of_op: dict[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    forward: list[Op] = field(default_factory=list[Op])
    backward: list[Op] = field(default_factory=list[Op])
    constants: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        self.nodes = list(self.gm.graph.nodes)
        self.places = Places(self.gm.graph)
        outputs = self.nodes[-1].args[0]
        assert isinstance(outputs, (tuple, list))
        self.forward_results = list(outputs[: self.num_forward_outputs])
        self.backward_results = list(outputs[self.num_forward_outputs :])
        descriptions = self.nodes[-1].meta["desc"][: self.num_forward_outputs]
        self.overwritten_inputs = [getattr(what, "mutated_input", None) for what in descriptions]
        self.from_tangents = self._descendants_of_tangents()
        self.in_forward = self._forward_nodes()
        self.overwritten = self._overwritten_values()

    def _descendants_of_tangents(self) -> set[fx.Node]:
        found = {node for node in self.nodes if is_tangent(node)}
        for node in self.nodes:
            if node.op == "call_function" and any(a in found for a in node.all_input_nodes):
                found.add(node)
        return found

    def _forward_nodes(self) -> set[fx.Node]:
        """Ancestors of forward's results, and what draws or has effects there."""
        effects = [
            node
            for node in self.nodes
            if node.op == "call_function"
            and node not in self.from_tangents
            and (draws_randomness(node) or not any(t is not None for t in tensors_of(node)))
        ]
        found: set[fx.Node] = set()
        stack = [n for n in self.forward_results if isinstance(n, fx.Node)] + effects
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack.extend(node.all_input_nodes)
        return found

    def _overwritten_values(self) -> dict[str, str]:
        """Resident values that the step overwrites, with the name users know them by."""
        overwritten = {what for what in self.overwritten_inputs if what is not None}
        return {
            node.name: str(getattr(node.meta["desc"], "target", node.name)).removeprefix("model.")
            for node in self.nodes
            if node.op == "placeholder" and node.meta.get("desc") in overwritten
        }

    def build(self, name: str, resident: Resident, **facts: Any) -> Joint:
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._add_resident(node)
        self._add_tangents()
        for node in self.nodes:
            if node.op == "call_function":
                self._add_call(node)
        given = self._names_of(self.forward_results)
        kept = self._names_of(
            result
            for result, overwrites in zip(
                self.forward_results, self.overwritten_inputs, strict=True
            )
            if overwrites is None
        )
        gradients = self._names_of(self.backward_results)
        tangents = [v.name for v in self.values.values() if v.kind == "tangent"]
        ends = (*kept, *gradients, *tangents)
        self._mark(kept, "output")
        graph = TrainingGraph(
            name=name,
            ops=(*self.forward, *self.backward),
            values=tuple(self.values.values()),
            forward_outputs=tuple(dict.fromkeys(given)),
            outputs=tuple(dict.fromkeys(ends)),
            resident=_with_constants(resident, sum(self.constants.values())),
            **facts,
        )
        return Joint(
            self.gm, self.num_forward_outputs, graph,
            self.node_of_op, self.value_of_node, self.base_of_value,
        )  # fmt: skip

    def _names_of(self, results: Iterable[Any]) -> list[str]:
        """Values of those results that are not resident."""
        names = [self._value(n) for n in results if isinstance(n, fx.Node)]
        return [name for name in names if name and self.values[name].producer]

    def _mark(self, names: list[str], kind: Kind) -> None:
        for name in names:
            old = self.values[name]
            self.values[name] = Value(
                name, old.size_bytes, old.producer, kind, old.dtype, old.shape
            )

    def _value(self, node: fx.Node) -> str:
        return self.value_of_node.get(node, "")

    def _add_resident(self, node: fx.Node) -> None:
        if is_tangent(node):
            return
        tensor = self._attribute(node) if node.op == "get_attr" else node.meta.get("val")
        if not isinstance(tensor, Tensor):
            return
        if node.op == "get_attr":
            self._check_constant(node, tensor)
            self.constants[storage_key(tensor)] = tensor.untyped_storage().nbytes()
            shown = node.meta.get("val")
            tensor = shown if isinstance(shown, Tensor) else tensor
        key = storage_key(tensor)
        if key not in self.by_storage:
            kind = _kind_of_input(node)
            self._register(node.name, node, tensor, "", kind)
            self.base_of_value[node.name] = node
        self.value_of_node[node] = self.by_storage[key]

    def _attribute(self, node: fx.Node) -> Any:
        found: Any = self.gm
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return found

    def _check_constant(self, node: fx.Node, tensor: Tensor) -> None:
        if tensor.requires_grad:
            raise CaptureError(
                f"forward uses a tensor of shape {list(tensor.shape)} that requires grad and is "
                "neither a parameter nor an argument, so its gradient would be lost. Register it "
                "as a parameter of the model, or pass it as an argument"
            )

    def _add_tangents(self) -> None:
        names: list[str] = []
        for node in self.nodes:
            if is_tangent(node):
                tensor = node.meta["val"]
                self._register(node.name, node, tensor, "tangents", "tangent")
                self.value_of_node[node] = node.name
                self.base_of_value[node.name] = node
                names.append(node.name)
        pin = "its results arrive from autograd"
        self.backward.append(Op("tangents", TANGENTS, "backward", (), tuple(names), pinned=pin))

    def _register(
        self, name: str, node: fx.Node, tensor: Tensor, producer: str, kind: Kind
    ) -> None:
        self.by_storage[storage_key(tensor)] = name
        self.values[name] = Value(
            name=name,
            size_bytes=result_bytes(node, tensor),
            producer=producer,
            kind=kind,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(int(n) for n in tensor.shape),
        )

    def _add_call(self, node: fx.Node) -> None:
        tensors = [t for t in tensors_of(node) if t is not None]
        refuse_op(node, self.places.of)
        if is_getitem(node) or is_alias_of_input(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            known = self._value(source) if is_alias_of_input(node) else ""
            if not known and tensors:
                known = self.by_storage[storage_key(tensors[0])]
            if is_alias_of_input(node):
                self.by_storage[storage_key(tensors[0])] = known
            self.value_of_node[node] = known
            if is_getitem(node) and source.name in self.node_of_op:
                self.base_of_value.setdefault(known, node)
            return
        keys = {storage_key(t) for t in tensors}
        if tensors and keys <= self.by_storage.keys():
            if len(keys) == 1:
                self.value_of_node[node] = self.by_storage[keys.pop()]
            return
        self._add_op(node)

    def _add_op(self, node: fx.Node) -> None:
        module, source = self.places.of(node)
        phase: Phase = "forward" if node in self.in_forward else "backward"
        ops = self.forward if phase == "forward" else self.backward
        outputs = self._add_outputs(node, phase)
        inputs = self._input_values(node)
        workspace_bytes = 0
        pinned = self._why_pinned(node, phase, inputs, module, source)
        if phase == "forward" and draws_randomness(node):
            state = self._add_rng_state(node, module, source)
            inputs = (*inputs, state)
            workspace_bytes = self.values[state].size_bytes
        statistics: Op | None = None
        if makes_statistics(node):
            inputs, outputs, statistics = self._split_batch_norm(node, outputs, module, source)
            pinned = ""
        self.node_of_op[node.name] = node
        ops.append(
            Op(
                node.name, target_name(node), phase, inputs, outputs,
                workspace_bytes=workspace_bytes, pinned=pinned, module=module, source=source,
            )
        )  # fmt: skip
        if statistics is not None:
            ops.append(statistics)

    def _add_outputs(self, node: fx.Node, phase: Phase) -> tuple[str, ...]:
        several = isinstance(node.meta.get("val"), (tuple, list))
        picked = {user.args[1]: user for user in node.users if is_getitem(user)}
        names: list[str] = []
        for i, tensor in enumerate(tensors_of(node)):
            if tensor is None or storage_key(tensor) in self.by_storage:
                continue
            name = node.name
            if several:
                name = picked[i].name if i in picked else f"{node.name}.{i}"
            kind: Kind = "activation" if phase == "forward" else "gradient"
            self._register(name, node, tensor, node.name, kind)
            names.append(name)
            if not several:
                self.value_of_node[node] = name
                self.base_of_value[name] = node
        return tuple(names)

    def _input_values(self, node: fx.Node) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for source in node_inputs(node):
            name = self._value(source)
            if name:
                names.setdefault(name)
            elif any(t is not None for t in tensors_of(source)):
                for tensor in tensors_of(source):
                    if tensor is not None:
                        names.setdefault(self.by_storage[storage_key(tensor)])
        return tuple(names)

    def _why_pinned(
        self, node: fx.Node, phase: Phase, inputs: tuple[str, ...], module: str, source: str
    ) -> str:
        for name in inputs:
            if name in self.overwritten and phase == "forward":
                return f"it reads {self.overwritten[name]}, which the step overwrites"
            if name in self.overwritten:
                raise CaptureError(
                    f"backward of module {module or '(root)'} ({source}) reads "
                    f"{self.overwritten[name]}, which forward overwrites. Give forward a copy: "
                    "x.clone() before the in-place change"
                )
        if argument(node, "generator") is not None:
            return "it draws from a generator of its own"
        if node.target is CHOSEN_BACKWARD:
            return "it may write to what its forward has reserved for it"
        if draws_randomness(node) and phase == "backward":
            return "it draws random numbers in backward"
        return "" if any(t is not None for t in tensors_of(node)) else "it has effects only"

    def _add_rng_state(self, node: fx.Node, module: str, source: str) -> str:
        name = f"rng_state_{node.name}"
        size = rng_state_bytes(drawn_on(node))
        self.values[name] = Value(name, size, name, "rng_state", "uint8", (size,))
        self.forward.append(
            Op(
                name, SAVE_RNG, "forward", (), (name,),
                pinned="it saves the random stream where it stands", module=module, source=source,
            )
        )  # fmt: skip
        return name

    def _split_batch_norm(
        self, node: fx.Node, outputs: tuple[str, ...], module: str, source: str
    ) -> tuple[tuple[str, ...], tuple[str, ...], Op]:
        """The normalisation, which may run again, apart from the update of its statistics."""
        read = [a for a in node.args[:3] if isinstance(a, fx.Node)]
        running = [a for a in node.args[3:5] if isinstance(a, fx.Node)]
        name = f"{node.name}_statistics"
        _, n_results = AGAIN[node.target]
        results, updates = outputs[:n_results], outputs[n_results:]
        for update in updates:
            old = self.values[update]
            self.values[update] = Value(
                update, old.size_bytes, name, "buffer", old.dtype, old.shape
            )
        statistics = Op(
            name, STATISTICS, "forward", (results[1], *map(self._value, running)), updates,
            pinned="it updates running statistics", module=module, source=source,
        )  # fmt: skip
        return tuple(dict.fromkeys(map(self._value, read))), results, statistics


def rng_state_bytes(device: torch.device) -> int:
    """Bytes that a saved state of the device's default generator takes there.

    That of a CUDA device is kept on the host.
    """
    return 0 if device.type == CUDA else torch.get_rng_state().nbytes


def _kind_of_input(node: fx.Node) -> Kind:
    described: dict[str, Kind] = {"ParamAOTInput": "parameter", "BufferAOTInput": "buffer"}
    if node.op == "get_attr":
        return "constant"
    return described.get(type(node.meta.get("desc")).__name__, "input")


def _with_constants(resident: Resident, constants_bytes: int) -> Resident:
    buffers_bytes = resident.buffers_bytes + constants_bytes
    return msgspec.structs.replace(resident, buffers_bytes=buffers_bytes)


def build_joint(
    gm: fx.GraphModule, num_forward_outputs: int, name: str, resident: Resident, **facts: Any
) -> Joint:
    """Analyse a joint graph: storages to values, nodes to ops, views to nothing.

    Raises
    ------
    CaptureError : the graph mutates a tensor, or uses one whose gradient would be lost.
    """
    make_dropout_exact(gm)
    run_by_kernels_of_eager(gm)
    lay_out_gradients(gm, num_forward_outputs)
    return _Builder(gm, num_forward_outputs).build(name, resident, **facts)
