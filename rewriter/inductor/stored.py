"""Which pointwise nodes of Inductor's joint graph are values, not parts of what reads them.

A node that is inlined into several kernels makes each of them hold what it reads. Where that is
more than the node itself, it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from remat.graph_capture.joint.nodes import is_getitem, node_inputs, tensors_of
from remat.rewriter.inductor.nodes import is_generated, is_inlined, is_reduction, is_view

MOST_READS = 4
"""Inductor stores a pointwise result that is read twice and reads more values than this."""
MOST_LARGE_READS = 2
"""We also store one that is read twice and reads more values than this of at least its own size:
then one value is held instead of all. On a ResNet-18 that took the least peak from 101 to 85 MB."""
MOST_HELD = 2
"""If more results than this wait for a later call, only to be read by one kernel, a part of that
kernel is computed and stored before the call. Gradients of a shared weight, which are added up, are
such results: on an LSTM that took the least peak in the graph from 35.7 to 11.1 MB."""

aten = torch.ops.aten


@dataclass
class StoredNodes:
    """Says for each inlined node whether it is stored; asked in the order of the nodes.

    Attributes
    ----------
    in_forward : the nodes of forward. readers : what reads each node, through views.
    reads : the stored nodes and inputs that each inlined node reads.
    held : those of `reads` that nothing else reads.
    """

    nodes: Sequence[fx.Node]
    in_forward: set[fx.Node]
    readers: dict[fx.Node, list[fx.Node]]
    reads: dict[fx.Node, set[fx.Node]] = field(default_factory=dict[fx.Node, set[fx.Node]])
    held: dict[fx.Node, set[fx.Node]] = field(default_factory=dict[fx.Node, set[fx.Node]])

    def __post_init__(self) -> None:
        self.last_call = _last_calls(self.nodes)

    def is_stored(self, node: fx.Node) -> bool:
        """Whether an inlined node is a value of its own."""
        readers = self.readers[node]
        is_result = any(reader.op == "output" for reader in readers)
        is_crossing = node in self.in_forward and any(r not in self.in_forward for r in readers)
        by_call = any(not is_inlined(reader) and not is_reduction(reader) for reader in readers)
        self.reads[node], self.held[node] = self._sources(node), self._held(node)
        stored = (
            is_result or is_crossing or by_call
            or (len(readers) > 1 and self._is_heavy(node)) or self._frees_more(node)
        )  # fmt: skip
        if stored:
            del self.reads[node], self.held[node]
        return stored

    def _is_heavy(self, node: fx.Node) -> bool:
        """Whether the node reads so much that its readers should read it instead."""
        reads = self.reads[node]
        return len(reads) > MOST_READS or _count_large(reads, node) > MOST_LARGE_READS

    def _frees_more(self, node: fx.Node) -> bool:
        """Whether more than the node takes would be held until a later call has run."""
        waits = any(self.last_call[r] > self.last_call[node] for r in self.readers[node])
        most = 1 if is_added_product(node) else MOST_HELD
        return waits and _count_large(self.held[node], node) > most

    def _sources(self, node: fx.Node) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for source in map(_base, node_inputs(node)):
            found |= self.reads.get(source, {source})
        return found

    def _held(self, node: fx.Node) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for source in map(_base, node_inputs(node)):
            if source.op == "call_function" and set(self.readers[source]) == {node}:
                found |= self.held.get(source, {source})
        return found


def _last_calls(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For each node, the place of the last call that must run before it, itself included."""
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        is_part = is_view(node) or is_getitem(node) or is_generated(node)
        is_call = node.op == "call_function" and not is_part
        last[node] = i if is_call else max((last[s] for s in node.all_input_nodes), default=-1)
    return last


def is_added_product(node: fx.Node) -> bool:
    """Whether Inductor makes one call of the node and a matrix product that it reads."""
    return node.target == aten.add.Tensor and any(
        source.target == aten.mm.default for source in node.all_input_nodes
    )


def _base(node: fx.Node) -> fx.Node:
    """The node whose storage a view shows."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _bytes_of(node: fx.Node) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors_of(node) if t is not None)


def _count_large(sources: set[fx.Node], node: fx.Node) -> int:
    made = _bytes_of(node)
    return sum(_bytes_of(source) >= made for source in sources)
