"""The values of a joint graph: each storage, with all tensors that alias it, is one value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import msgspec
import torch
from torch import Tensor, fx

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Kind, Phase, Value
from remat.graph_capture.joint.nodes import (
    is_getitem,
    is_tangent,
    node_inputs,
    result_bytes,
    storage_key,
    tensors_of,
)


def _none_written() -> dict[Phase, dict[str, str]]:
    return {"forward": {}, "backward": {}}


@dataclass
class ValueTable:
    """Values found so far, and the nodes that stand for them.

    Attributes
    ----------
    gm : the joint graph. by_name : each value.
    of_storage : name of the value of each storage.
    of_node : name of the value that a tensor node belongs to.
    base_of : the node that first returns a value.
    constants_bytes : size of each storage that the graph holds itself.
    written : by phase, for each value that is written to in place: what stands for the last write
        so far. It takes no bytes. What reads the value in that phase reads it too, so as to come
        after.
    """

    gm: fx.GraphModule
    by_name: dict[str, Value] = field(default_factory=dict[str, Value])
    of_storage: dict[int, str] = field(default_factory=dict[int, str])
    of_node: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    base_of: dict[str, fx.Node] = field(default_factory=dict[str, fx.Node])
    constants_bytes: dict[int, int] = field(default_factory=dict[int, int])
    written: dict[Phase, dict[str, str]] = field(default_factory=_none_written)

    def of(self, node: fx.Node) -> str:
        """The value of a node; empty for one that returns several or none."""
        return self.of_node.get(node, "")

    def changed(self, name: str, **fields: Any) -> None:
        """Give the value of that name other `fields`."""
        self.by_name[name] = msgspec.structs.replace(self.by_name[name], **fields)

    def register(self, name: str, node: fx.Node, tensor: Tensor, producer: str, kind: Kind) -> None:
        """Add the value of a storage that was not seen before."""
        self.of_storage[storage_key(tensor)] = name
        self.by_name[name] = Value(
            name=name,
            size_bytes=result_bytes(node, tensor),
            producer=producer,
            kind=kind,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(int(n) for n in tensor.shape),
        )

    def add_resident(self, node: fx.Node) -> None:
        """Add what an input or a constant of the graph stands for."""
        if is_tangent(node):
            return
        is_constant = node.op == "get_attr"
        tensor: Any = attrgetter(str(node.target))(self.gm) if is_constant else node.meta.get("val")
        if not isinstance(tensor, Tensor):
            return
        if is_constant:
            _check_constant(tensor)
            if tensor.layout != torch.strided:
                raise CaptureError(
                    f"the model holds a {tensor.layout} tensor that is neither parameter nor "
                    "buffer, and only strided ones can be planned: keep its indices and values as "
                    "buffers and compute with them (torch.Tensor.index_add, or a dense product)"
                )
            self.constants_bytes[storage_key(tensor)] = tensor.untyped_storage().nbytes()
            # Views of a constant in the graph alias the traced tensor, not the real one.
            shown = node.meta.get("val")
            tensor = shown if isinstance(shown, Tensor) else tensor
        key = storage_key(tensor)
        if key not in self.of_storage:
            self.register(node.name, node, tensor, "", _kind_of_input(node))
            self.base_of[node.name] = node
        self.of_node[node] = self.of_storage[key]

    def add_tangents(self, nodes: Iterable[fx.Node], several: Mapping[int, int]) -> tuple[str, ...]:
        """Add the gradients that autograd hands to backward; their names.

        A tensor that is returned several times gets several gradients, and autograd's engine holds
        them beside the sum that it hands on. `several` says how many, by the index of the result.
        """
        names: list[str] = []
        for node in nodes:
            if is_tangent(node):
                gradient: Tensor = node.meta["val"]
                self.register(node.name, node, gradient, "tangents", "tangent")
                # That of a view has the view's strides in the trace, but not a storage as large.
                size_bytes = gradient.numel() * gradient.element_size()
                self.changed(node.name, size_bytes=size_bytes)
                self.of_node[node] = node.name
                self.base_of[node.name] = node
                names.append(node.name)
                names += self._add_summands(node, several.get(_result_of(node), 0))
        return tuple(names)

    def _add_summands(self, tangent: fx.Node, number: int) -> list[str]:
        names = [f"{tangent.name}.{i}" for i in range(number)]
        for name in names:
            self.by_name[name] = msgspec.structs.replace(self.by_name[tangent.name], name=name)
        return names

    def add_outputs(self, node: fx.Node, phase: Phase) -> tuple[str, ...]:
        """Add the storages that a node creates; their names."""
        several = isinstance(node.meta.get("val"), (tuple, list))
        picked = {user.args[1]: user for user in node.users if is_getitem(user)}
        names: list[str] = []
        for i, tensor in enumerate(tensors_of(node)):
            if tensor is None or storage_key(tensor) in self.of_storage:
                continue
            name = node.name
            if several:
                name = picked[i].name if i in picked else f"{node.name}.{i}"
            kind: Kind = "activation" if phase == "forward" else "gradient"
            self.register(name, node, tensor, node.name, kind)
            names.append(name)
            if not several:
                self.of_node[node] = name
                self.base_of[name] = node
        return tuple(names)

    def read_by(self, node: fx.Node) -> tuple[str, ...]:
        """Distinct values that a node reads, in argument order."""
        names: dict[str, None] = {}
        for source in node_inputs(node):
            name = self.of(source)
            if name:
                names.setdefault(name)
            elif any(t is not None for t in tensors_of(source)):
                for tensor in tensors_of(source):
                    if tensor is not None:
                        names.setdefault(self.of_storage[storage_key(tensor)])
        return tuple(names)

    def writes_before(self, names: Iterable[str], phase: Phase) -> tuple[str, ...]:
        """What stands for the last writes so far to those that are written to in that phase.

        Those of forward are over when backward begins.
        """
        written = self.written[phase]
        return tuple(written[name] for name in names if name in written)

    def add_write(self, nodes: Sequence[fx.Node], phase: Phase) -> str:
        """Add a write in place: the first node writes to its first argument, as do the others.

        What stands for it has the first node's name.
        """
        node = nodes[0]
        assert isinstance(node.args[0], fx.Node)
        written = self.of(node.args[0])
        self.by_name[node.name] = Value(node.name, 0, node.name)
        self.written[phase][written] = node.name
        for one in nodes:
            self.of_node[one] = written
            self.of_storage[storage_key(one.meta["val"])] = written
        return node.name

    def made_by_ops(self, results: Iterable[Any]) -> list[str]:
        """Values of those results that are not resident."""
        names = [self.of(n) for n in results if isinstance(n, fx.Node)]
        return [name for name in names if name and self.by_name[name].producer]


def _result_of(tangent: fx.Node) -> int:
    """The index of the result whose gradient it is; -1 for what is none of the module's own."""
    return getattr(getattr(tangent.meta.get("desc"), "output", None), "idx", -1)


def _check_constant(tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise CaptureError(
            f"forward uses a tensor of shape {list(tensor.shape)} that requires grad and is "
            "neither a parameter nor an argument, so its gradient would be lost. Register it "
            "as a parameter of the model, or pass it as an argument"
        )


def _kind_of_input(node: fx.Node) -> Kind:
    described: dict[str, Kind] = {"ParamAOTInput": "parameter", "BufferAOTInput": "buffer"}
    if node.op == "get_attr":
        return "constant"
    return described.get(type(node.meta.get("desc")).__name__, "input")
