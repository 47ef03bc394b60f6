"""The values of a joint graph: each storage, with all tensors that alias it, is one value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from msgspec.structs import replace
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

_KINDS_OF_INPUTS: dict[str, Kind] = {"ParamAOTInput": "parameter", "BufferAOTInput": "buffer"}


@dataclass
class ValueTable:
    gm: fx.GraphModule
    by_name: dict[str, Value] = field(default_factory=dict[str, Value])
    of_storage: dict[int, str] = field(default_factory=dict[int, str])  # by `storage_key`
    of_node: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    base_of: dict[str, fx.Node] = field(default_factory=dict[str, fx.Node])  # first to return it
    constants_bytes: dict[int, int] = field(default_factory=dict[int, int])  # by `storage_key`
    # By value written in place: the token of its last write, which later readers read too.
    written: dict[Phase, dict[str, str]] = field(
        default_factory=lambda: {"forward": {}, "backward": {}}
    )

    def of(self, node: fx.Node) -> str:
        """Empty for a node that returns several values or none."""
        return self.of_node.get(node, "")

    def changed(self, name: str, **fields: Any) -> None:
        self.by_name[name] = replace(self.by_name[name], **fields)

    def register(self, name: str, node: fx.Node, tensor: Tensor, producer: str, kind: Kind) -> None:
        self.of_storage[storage_key(tensor)] = name
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(map(int, tensor.shape))
        self.by_name[name] = Value(name, result_bytes(node, tensor), producer, kind, dtype, shape)

    def add_resident(self, node: fx.Node) -> None:
        if is_tangent(node):
            return
        is_constant = node.op == "get_attr"
        tensor: Any = attrgetter(str(node.target))(self.gm) if is_constant else node.meta.get("val")
        if not isinstance(tensor, Tensor):
            return
        if is_constant:
            if tensor.requires_grad:
                shape = list(tensor.shape)
                raise CaptureError(
                    "register it as a parameter, or pass it as an argument: forward uses a tensor "
                    f"of shape {shape} that requires grad and is neither, so its gradient would "
                    "be lost"
                )
            if tensor.layout != torch.strided:
                raise CaptureError(
                    "keep its indices and values as buffers and compute with them "
                    "(torch.Tensor.index_add, or a dense product): the model holds a "
                    f"{tensor.layout} tensor that is neither parameter nor buffer, and only "
                    "strided ones can be planned"
                )
            self.constants_bytes[storage_key(tensor)] = tensor.untyped_storage().nbytes()
            shown = node.meta.get("val")  # views of a constant alias the traced tensor
            tensor = shown if isinstance(shown, Tensor) else tensor
        key = storage_key(tensor)  # inputs that share a storage are one value
        if key not in self.of_storage:
            described = type(node.meta.get("desc")).__name__  # private classes, by name
            kind = "constant" if is_constant else _KINDS_OF_INPUTS.get(described, "input")
            self.register(node.name, node, tensor, "", kind)
            self.base_of[node.name] = node
        self.of_node[node] = self.of_storage[key]

    def add_tangents(self, nodes: Iterable[fx.Node], several: Mapping[int, int]) -> tuple[str, ...]:
        """`several` : how many gradients there are of a result that is returned several times."""
        names: list[str] = []
        for node in nodes:
            if is_tangent(node):
                gradient: Tensor = node.meta["val"]
                self.register(node.name, node, gradient, "tangents", "tangent")
                # That of a view has the view's strides in the trace, but not a storage as large.
                self.changed(node.name, size_bytes=gradient.numel() * gradient.element_size())
                self.of_node[node] = node.name
                self.base_of[node.name] = node
                names.append(node.name)
                # Autograd's engine holds several gradients beside the sum that it hands on.
                result = getattr(getattr(node.meta.get("desc"), "output", None), "idx", -1)
                for name in (f"{node.name}.{i}" for i in range(several.get(result, 0))):
                    self.by_name[name] = replace(self.by_name[node.name], name=name)
                    names.append(name)
        return tuple(names)

    def add_outputs(self, node: fx.Node, phase: Phase) -> tuple[str, ...]:
        several = isinstance(node.meta.get("val"), (tuple, list))
        picked = {user.args[1]: user for user in node.users if is_getitem(user)}
        names: list[str] = []
        for i, tensor in enumerate(tensors_of(node)):
            # A result that aliases an input makes no new value.
            if tensor is None or storage_key(tensor) in self.of_storage:
                continue
            name = node.name
            if several:
                # Nothing picks a result that is not used, but it takes memory all the same.
                name = picked[i].name if i in picked else f"{node.name}.{i}"
            kind: Kind = "activation" if phase == "forward" else "gradient"
            self.register(name, node, tensor, node.name, kind)
            names.append(name)
            if not several:
                self.of_node[node] = name
                self.base_of[name] = node
        return tuple(names)

    def read_by(self, node: fx.Node) -> tuple[str, ...]:
        """Distinct, in argument order."""
        names: list[str] = []
        for source in node_inputs(node):
            if name := self.of(source):
                names.append(name)
                continue
            # A node of several tensors, read as a whole, stands for all of them.
            tensors = (tensor for tensor in tensors_of(source) if tensor is not None)
            names += [self.of_storage[storage_key(tensor)] for tensor in tensors]
        return tuple(dict.fromkeys(names))

    def writes_before(self, names: Iterable[str], phase: Phase) -> tuple[str, ...]:
        written = self.written[phase]  # forward's are over when backward begins
        return tuple(written[name] for name in names if name in written)

    def add_write(self, nodes: Sequence[fx.Node], phase: Phase) -> str:
        """Add the token of a write in place: all of `nodes` stand for the tensor written to."""
        node = nodes[0]
        assert isinstance(node.args[0], fx.Node)
        written = self.of(node.args[0])
        self.by_name[node.name] = Value(node.name, 0, node.name)
        self.written[phase][written] = node.name
        for one in nodes:
            self.of_node[one] = written
            # In the trace each has a new storage, but when run it is the one that was written to.
            self.of_storage[storage_key(one.meta["val"])] = written
        return node.name

    def made_by_ops(self, results: Iterable[Any]) -> list[str]:
        """Values of those results that are not resident."""
        names = [self.of(n) for n in results if isinstance(n, fx.Node)]
        return [name for name in names if name and self.by_name[name].producer]
