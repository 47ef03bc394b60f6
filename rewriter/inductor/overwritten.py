"""Inputs that a step overwrites: what it reads of them is read before that, or from a copy.

Inductor's joint graph writes to inputs at its end, or leaves it to the caller. It reads them where
it likes: backward may read an input again, and then finds what forward has written. Torch's own cut
of such a graph gives wrong gradients, without a word. So every reader is given a copy that forward
makes, before the graph is planned. Where only forward reads, the copy is inlined and costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.joint.nodes import is_tangent, mutates, storage_key

_COPY = torch.ops.aten.clone.default


def overwritten_inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """Inputs that the graph writes to, or whose new value it returns for the caller to write.

    So are those that share a storage with one of them.
    """
    inputs = [n for n in gm.graph.find_nodes(op="placeholder") if not is_tangent(n)]
    written = {node.args[0] for node in gm.graph.nodes if mutates(node)}
    by_caller = {getattr(said, "mutated_input", None) for said in _descriptions(gm)} - {None}
    found = {n for n in inputs if n in written or n.meta.get("desc") in by_caller}
    storages = {_storage_of(n) for n in found}
    return [n for n in inputs if n in found or _storage_of(n) in storages]


def n_written_by_caller(gm: fx.GraphModule) -> int:
    """How many results of forward are new values of inputs; they come before all others."""
    return sum(hasattr(said, "mutated_input") for said in _descriptions(gm))


def read_from_copies(gm: fx.GraphModule, overwritten: Sequence[fx.Node]) -> list[fx.Node]:
    """Let the readers of overwritten inputs read copies, which are returned; changed in place."""
    copies: list[fx.Node] = []
    inputs = gm.graph.find_nodes(op="placeholder")
    for node in overwritten:
        readers = [u for u in node.users if not (mutates(u) and u.args[0] is node)]
        if not readers or not isinstance(node.meta.get("val"), Tensor):
            continue
        with gm.graph.inserting_after(copies[-1] if copies else inputs[-1]):
            copy = gm.graph.call_function(_COPY, (node,))
        copy.meta = {**readers[0].meta, "val": torch.empty_like(node.meta["val"])}
        copy.meta.pop("tensor_meta", None)
        for reader in readers:
            reader.replace_input_with(node, copy)
        copies.append(copy)
    gm.recompile()
    return copies


def _descriptions(gm: fx.GraphModule) -> Sequence[Any]:
    """AOTAutograd's word for what each result of the joint graph is."""
    return gm.graph.output_node().meta.get("desc") or ()


def _storage_of(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return storage_key(value) if isinstance(value, Tensor) else None
