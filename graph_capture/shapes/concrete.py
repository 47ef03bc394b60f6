"""A joint graph at given sizes, from one with symbols: the same ops, and numbers for the symbols.

All that reads a joint graph then sees what a trace at these sizes would have: tensors of plain
shapes, of which those that share memory still do. The numbers that follow from the sizes are
`SizeArgument`s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.nodes import storage_key, target_name
from remat.graph_capture.shapes.arguments import FloatOfSizes, SizeArgument
from remat.graph_capture.shapes.environment import Environment

SYMBOLIC = "remat_symbolic"
"""Key of a node's meta: its traced value, with symbols."""
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NO_NAMES: dict[str, Any] = {"__builtins__": {}, "max": max, "min": min}


def at_sizes(gm: fx.GraphModule, env: Environment, sizes: Mapping[str, int]) -> fx.GraphModule:
    """A copy of the joint graph `gm` with numbers in place of symbols.

    Raises
    ------
    CaptureError : an op takes a number that is computed of sizes in a way that is not known here.
    """
    return _AtSizes(gm, env, sizes).copy()


class _AtSizes:
    def __init__(self, gm: fx.GraphModule, env: Environment, sizes: Mapping[str, int]) -> None:
        self.gm, self.env, self.sizes = gm, env, sizes
        self.copies: dict[fx.Node, fx.Node] = {}
        self.storages: dict[int, Any] = {}

    def copy(self) -> fx.GraphModule:
        graph = fx.Graph()
        for node in self.gm.graph.nodes:
            if isinstance(node.meta.get("val"), _NUMBERS) and node.op != "output":
                continue
            args, kwargs = pytree.tree_map(self._argument, (tuple(node.args), dict(node.kwargs)))
            copy = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
            copy.meta = dict(node.meta)
            if "val" in node.meta:
                copy.meta[SYMBOLIC] = node.meta["val"]
                copy.meta["val"] = pytree.tree_map_only(Tensor, self._tensor, node.meta["val"])
            self.copies[node] = copy
        return fx.GraphModule(self.gm, graph)

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            value = leaf.meta.get("val")
            if not isinstance(value, _NUMBERS) or leaf.op == "output":
                return self.copies[leaf]
            return self._number(value, leaf)
        return self._number(leaf, None) if isinstance(leaf, _NUMBERS) else leaf

    def _number(self, value: Any, node: fx.Node | None) -> Any:
        if isinstance(value, torch.SymInt):
            number = self.env.value(value, self.sizes)
            text = self.env.text(value)
            return number if text.lstrip("-").isdigit() else SizeArgument(number, text)
        if node is None or isinstance(value, torch.SymBool):
            raise CaptureError(
                f"an op takes {value}, which is made of sizes that vary, and no plan for a range "
                "can make it again: leave those sizes out of dynamic"
            )
        bound: dict[str, Any] = {}
        text = self._code(node, bound)
        names = {**bound, **self.sizes}
        return FloatOfSizes(float(eval(text, dict(_NO_NAMES), names)), text, bound)

    def _code(self, leaf: Any, bound: dict[str, Any]) -> str:
        """Python that computes what the trace has computed of sizes, by the same functions."""
        if not isinstance(leaf, fx.Node):
            return f"({leaf!r})"
        value = leaf.meta.get("val")
        if isinstance(value, torch.SymInt):
            return f"({self.env.text(value)})"
        if not isinstance(value, torch.SymFloat) or leaf.kwargs or not callable(leaf.target):
            raise CaptureError(
                f"{target_name(leaf)} computes a number of sizes that vary, and no plan for a "
                "range can do so again: leave those sizes out of dynamic"
            )
        name = f"_f{len(bound)}"
        bound[name] = leaf.target
        return f"{name}({', '.join(self._code(arg, bound) for arg in leaf.args)})"

    def _tensor(self, traced: Tensor) -> Tensor:
        """`traced` at the sizes, in the storage of those that it shares one with."""
        if traced.layout != torch.strided:
            return traced
        storage = traced.untyped_storage()
        size_bytes: Any = storage.nbytes()
        geometry = [*traced.shape, *traced.stride(), traced.storage_offset(), size_bytes]
        if not any(isinstance(number, torch.SymInt) for number in geometry):
            return traced
        shape = [self.env.value(n, self.sizes) for n in traced.shape]
        stride = [self.env.value(n, self.sizes) for n in traced.stride()]
        offset = self.env.value(cast("Any", traced.storage_offset()), self.sizes)
        mode: Any = getattr(traced, "fake_mode")  # noqa: B009
        with mode, torch.no_grad():
            key = storage_key(traced)
            if key not in self.storages:
                held = self.env.value(size_bytes, self.sizes)
                is_symbolic = isinstance(size_bytes, torch.SymInt)
                made = torch.empty(held, dtype=torch.uint8, device=traced.device)
                self.storages[key] = made.untyped_storage() if is_symbolic else storage
            view = torch.empty(0, dtype=traced.dtype, device=traced.device)
            view.set_(self.storages[key], offset, shape, stride)
        return view.requires_grad_(traced.requires_grad) if _may_need(traced) else view


def _may_need(traced: Tensor) -> bool:
    return traced.requires_grad and (traced.is_floating_point() or traced.is_complex())
