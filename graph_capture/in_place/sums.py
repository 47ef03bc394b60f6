"""Sums that eager adds up in place, without recording it.

They are gradients that a forward makes by chunks, and the gradients of what is used several times,
whose terms autograd's engine adds up in the first of them.

A trace makes a new tensor of each addition, so that the sum is there twice while one runs. Of a
gradient as large as the head of a language model that is more than eager has. Such a sum is one
value here, and what writes to it an op without a storage of its own.

The price is that none of these ops may run twice. So it is done where that costs nothing: where
what is written to was made for it, as zeros are, or is the first term of a sum; outside of what
autograd records; and where nothing reads the sum before it is done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from remat.graph_capture.graph import WRITES_FIRST
from remat.graph_capture.in_place.writes import (
    Write,
    as_written,
    has_own_storage,
    in_place_form,
    is_made_for_writes,
    only_write,
    op_called,
)
from remat.graph_capture.joint.eager_memory import RECORDED_KEY, WRITTEN_KEY
from remat.graph_capture.joint.nodes import is_getitem, is_view

aten = torch.ops.aten

BEGUN = "what follows writes to its result in place"
WRITES = "it writes in place"
_ADD = frozenset(
    {"add", "sub", "addmm", "addbmm", "baddbmm", "addmv", "addr", "addcmul", "index_add"}
)


@dataclass
class InPlace:
    """The writes of a joint graph that stay in place.

    Attributes
    ----------
    begins : the node that makes what is written to, and the tensor before the first write: itself,
        or a view of it. Tensors after writes are laid out as that one.
    targets : for each node that writes: the op that does so in place.
    before : for each tensor after a write: the tensor before it, of the same storage.
    scattered : what a trace makes of a write to a part: after the node that writes, these put the
        part back into the whole.
    """

    begins: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    targets: dict[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])
    before: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    scattered: dict[fx.Node, tuple[fx.Node, ...]] = field(
        default_factory=dict[fx.Node, tuple[fx.Node, ...]]
    )

    def why_pinned(self, write: fx.Node) -> str:
        """That it writes in place, and whether eager does so.

        To a view autograd's engine does not add, as the tensor that it shows is held beside it.
        """
        is_first = _is_sum_of_autograd(write) and is_view(write.all_input_nodes[0])
        return WRITES_FIRST if is_first else WRITES

    def last(self, first: fx.Node) -> fx.Node:
        """The tensor after the last write to `first`."""
        after = {before: node for node, before in self.before.items()}
        while first in after:
            first = after[first]
        return first


def writes_in_place(nodes: Sequence[fx.Node], in_forward: Collection[fx.Node]) -> InPlace:
    """Find the sums among `nodes` that forward or autograd adds up in place."""
    found = InPlace()
    known: set[fx.Node] = set()
    by_autograd = {n for n in nodes if n not in in_forward and _is_sum_of_autograd(n)}
    for node in nodes:
        if node not in known and has_own_storage(node):
            first = node if is_getitem(node) else as_written(node)
            writers = in_forward if node in in_forward else by_autograd
            for before, write in _writes_to(first, writers):
                if not (is_made_for_writes(node) or _adds_to_term(node, write.node)):
                    break
                found.begins[node] = first
                found.targets[write.node] = write.target
                found.before[write.result] = before
                found.scattered[write.node] = write.scattered
                known.update((write.node, *write.scattered))
    return found


def _writes_to(first: fx.Node, writers: Collection[fx.Node]) -> Iterator[tuple[fx.Node, Write]]:
    """The writes to `first` by `writers`, one after the other, each with the tensor before it."""
    while (write := only_write(first, _in_place)) is not None and write.node in writers:
        yield first, write
        first = write.result


def _adds_to_term(node: fx.Node, write: fx.Node) -> bool:
    """Whether `write` adds to what `node` has made, which autograd does not record."""
    # torch 2.11 tells only of the sum, and not of its terms, that backward has made it.
    is_recorded = WRITTEN_KEY not in _annotations(node)
    return _is_sum_of_autograd(write) or (not is_recorded and op_called(write) in _ADD)


def _annotations(node: fx.Node) -> Any:
    return node.meta.get("custom", {})


def _in_place(node: fx.Node) -> Any:
    """The op that does in place what `node` does, if eager has run that one."""
    if _is_sum_of_autograd(node):
        return aten.add_.Tensor
    return written_by_eager(node) if WRITTEN_KEY in _annotations(node) else None


def written_by_eager(node: fx.Node) -> Any:
    """The op in place that eager has run where the trace has `node`."""
    op, said = in_place_form(node), _annotations(node)
    written = said.get(WRITTEN_KEY, said.get(RECORDED_KEY))
    return op if op is not None and str(op) == written else None


def _is_sum_of_autograd(node: fx.Node) -> bool:
    """Whether autograd's engine adds a term there, which it does in place if it records nothing.

    The first term must be held by nothing else (`can_accumulate_inplace` of torch's
    csrc/autograd/input_buffer.cpp); here all that reads it is the sum.
    """
    is_sum = node.meta.get("is_gradient_acc", False) and WRITTEN_KEY in _annotations(node)
    return is_sum and node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs
