"""Sums that eager adds up in place, without recording it: gradients that a forward makes by chunks.

A trace makes a new tensor of each addition, so that the sum is there twice while one runs. Of a
gradient as large as the head of a language model that is more than eager has. Such a sum is one
value here, and what writes to it an op without a storage of its own.

The price is that none of these ops may run twice. So it is done where that costs nothing: where
what is written to was made for it (zeros, or what autograd itself has begun to add up), outside of
what autograd records, and where nothing reads the sum before it is done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from remat.graph_capture.joint.eager_memory import WRITTEN_KEY, is_view
from remat.graph_capture.joint.nodes import made_by_autograd

aten = torch.ops.aten

BEGUN = "what follows writes to its result in place"
WRITES = "it writes in place"
_BEGIN_EMPTY = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("zeros", "ones", "empty", "full")
    for prefix, suffix in (("", ""), ("", "_like"), ("new_", ""))
)
_SCATTER_OF = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}


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

    def last(self, first: fx.Node) -> fx.Node:
        """The tensor after the last write to `first`."""
        after = {before: node for node, before in self.before.items()}
        while first in after:
            first = after[first]
        return first


@dataclass(frozen=True)
class _Write:
    node: fx.Node
    target: Any
    scattered: tuple[fx.Node, ...]

    @property
    def result(self) -> fx.Node:
        return self.scattered[-1] if self.scattered else self.node


def writes_in_place(nodes: Sequence[fx.Node], in_forward: Collection[fx.Node]) -> InPlace:
    """Find the sums among `nodes` that forward adds up in place."""
    found = InPlace()
    known: set[fx.Node] = set()
    for node in nodes:
        if node in in_forward and node not in known and _may_begin(node):
            first = _as_written(node)
            for before, write in _writes_to(first, in_forward):
                found.begins[node] = first
                found.targets[write.node] = write.target
                found.before[write.result] = before
                found.scattered[write.node] = write.scattered
                known.update((write.node, *write.scattered))
    return found


def _may_begin(node: fx.Node) -> bool:
    """Whether what `node` makes is there to be added up in."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or is_view(node):
        return False
    name = getattr(node.target, "_opname", "")
    is_whole = value.untyped_storage().nbytes() == value.numel() * value.itemsize
    return is_whole and (name in _BEGIN_EMPTY or made_by_autograd(node))


def _as_written(node: fx.Node) -> fx.Node:
    """`node`, or the last of its views if each is all that reads the one before it."""
    while len(node.users) == 1:
        (user,) = node.users
        if not is_view(user) or user.meta["val"].numel() != node.meta["val"].numel():
            break
        node = user
    return node


def _writes_to(first: fx.Node, in_forward: Collection[fx.Node]) -> Iterator[tuple[fx.Node, _Write]]:
    """The writes to `first` one after the other, each with the tensor before it."""
    while (write := _only_write(first)) is not None and write.node in in_forward:
        yield first, write
        first = write.result


def _only_write(tensor: fx.Node) -> _Write | None:
    """The write to `tensor`, if that is all that reads it."""
    readers, views = _readers(tensor)
    writers = [node for node in readers if _in_place(node) is not None]
    if len(writers) != 1:
        return None
    (node,) = writers
    source: Any = node.args[0]
    reads_it = [a for a in pytree.tree_leaves((node.args, node.kwargs)) if a in views]
    if source not in views or len(reads_it) > 1 or not _alike(node, source):
        return None
    scattered: list[fx.Node] = []
    while not _is_all_of(source, tensor):
        scatter = _scatter(scattered[-1] if scattered else node, source)
        if scatter is None:
            return None
        scattered.append(scatter)
        source = source.args[0]
    write = _Write(node, _in_place(node), tuple(scattered))
    is_only = {node, *scattered} == set(readers) and _alike(write.result, tensor)
    return write if is_only else None


def _readers(tensor: fx.Node) -> tuple[dict[fx.Node, None], set[fx.Node]]:
    """What reads `tensor` or a view of it; and these views, itself among them."""
    views, readers = {tensor}, dict[fx.Node, None]()
    waiting = [tensor]
    while waiting:
        for user in waiting.pop().users:
            if is_view(user):
                views.add(user)
                waiting.append(user)
            else:
                readers.setdefault(user)
    return readers, views


def _is_all_of(view: fx.Node, tensor: fx.Node) -> bool:
    """Whether `view`, one of `tensor`, shows all of it as it is."""
    same = view.meta["val"].storage_offset() == tensor.meta["val"].storage_offset()
    return view is tensor or (same and _alike(view, tensor))


def _annotations(node: fx.Node) -> Any:
    return node.meta.get("custom", {})


def _in_place(node: fx.Node) -> Any:
    """The op that does in place what `node` does, if eager has run that one."""
    name = getattr(node.target, "_opname", "")
    packet = getattr(aten, f"{name}_", None)
    op = getattr(packet, getattr(node.target, "_overloadname", ""), None)
    return op if op is not None and str(op) == _annotations(node).get(WRITTEN_KEY) else None


def _scatter(part: fx.Node, view: fx.Node) -> fx.Node | None:
    """What puts `part`, written in the place of `view`, back into the whole."""
    users = list(part.users)
    if len(users) != 1 or users[0].target is not _SCATTER_OF.get(view.target):  # pyright: ignore
        return None
    same = users[0].args[0] is view.args[0] and users[0].args[1] is part
    return users[0] if same and users[0].args[2:] == view.args[1:] else None


def _alike(one: fx.Node, other: Any) -> bool:
    """Whether two tensors have the same dtype, sizes and strides."""
    a, b = one.meta["val"], other.meta["val"]
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
