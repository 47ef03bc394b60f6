"""Writes that a trace has taken apart: for a part of a tensor a view, an op, and a scatter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.graph import WRITES_FIRST
from remat.graph_capture.joint.eager_memory import RECORDED_KEY, WRITTEN_KEY
from remat.graph_capture.joint.nodes import (
    aten,
    is_alias_of_input,
    is_getitem,
    is_view,
    storage_key,
)
from remat.graph_capture.torch_private.core import pytree

_MAKES_EMPTY = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("zeros", "ones", "empty", "full")
    for prefix, suffix in (("", ""), ("", "_like"), ("new_", ""))
)
_SCATTER_OF = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}

_InPlaceOf = Callable[[fx.Node], Any]  # None if it may not


@dataclass(frozen=True)
class Write:
    node: fx.Node
    target: Any  # does so in place
    scattered: tuple[fx.Node, ...]  # puts the written part into the whole

    @property
    def result(self) -> fx.Node:
        return self.scattered[-1] if self.scattered else self.node


def _op_called(node: fx.Node) -> str:
    """Without namespace and overload; empty of what is no op."""
    return getattr(node.target, "_opname", "")


def in_place_form(node: fx.Node) -> Any:
    packet = getattr(aten, f"{_op_called(node)}_", None)
    return getattr(packet, getattr(node.target, "_overloadname", ""), None)


def is_made_for_writes(node: fx.Node) -> bool:
    """Whether `node` makes a tensor of equal numbers, or of none."""
    return _op_called(node) in _MAKES_EMPTY


def has_own_storage(node: fx.Node) -> bool:
    """Whether `node` makes or picks a tensor with a storage of its own, which it fills."""
    value: Any = node.meta.get("val")
    is_tensor = isinstance(value, Tensor) and value.layout == torch.strided
    if node.op != "call_function" or not is_tensor:
        return False
    # A part of a storage, as a split's, may share it with what others read.
    is_full = value.untyped_storage().nbytes() == value.numel() * value.itemsize
    is_of_split = is_getitem(node) and _is_split(node.all_input_nodes[0])
    return is_full and not is_view(node) and not is_of_split


def as_written(node: fx.Node) -> fx.Node:
    """`node`, or the last of its views if each is all that reads the one before it."""
    first = node
    while len(node.users) == 1:
        (user,) = node.users
        if not is_view(user) or user.meta["val"].numel() != node.meta["val"].numel():
            break
        node = user
        if not is_alias_of_input(node):
            first = node
    return first


def only_write(
    tensor: fx.Node, in_place: _InPlaceOf, may_read_it: Callable[[fx.Node], bool] = lambda _: False
) -> Write | None:
    """The write to `tensor`, if that is all that reads it. `may_read_it`: whether a node that
    writes to a part may read other parts too."""
    readers, views = reads_of(tensor)
    writers = [node for node in readers if in_place(node) is not None]
    if len(writers) != 1:
        return None
    (node,) = writers
    source: Any = node.args[0] if node.args else None
    reads_it = [a for a in pytree.tree_leaves((node.args, node.kwargs)) if a in views]
    if source not in views:
        return None
    a, b = node.meta["val"], source.meta["val"]
    if (a.dtype, a.shape) != (b.dtype, b.shape):  # no op in place promotes its first argument
        return None
    if len(reads_it) > 1 and not (may_read_it(node) and all(one in node.args for one in reads_it)):
        return None
    scattered: list[fx.Node] = []
    while not _is_all_of(source, tensor):
        scatter = _scatter(scattered[-1] if scattered else node, source)
        if scatter is None:
            return None
        scattered.append(scatter)
        source = _whole_of(source)
    write = Write(node, in_place(node), tuple(scattered))
    is_only = {node, *scattered} == set(readers) and is_laid_out_as(write.result, tensor)
    return write if is_only else None


def reads_of(tensor: fx.Node) -> tuple[dict[fx.Node, None], set[fx.Node]]:
    """What reads `tensor` or a view of it; and these views, itself among them."""
    views, readers = {tensor}, dict[fx.Node, None]()
    waiting = [tensor]
    while waiting:
        for user in waiting.pop().users:
            if is_view(user) or _is_split(user) or is_getitem(user):
                views.add(user)
                waiting.append(user)
            else:
                readers.setdefault(user)
    return readers, views


def _whole_of(view: fx.Node) -> Any:
    source = view.args[0]
    return source.args[0] if is_getitem(view) and isinstance(source, fx.Node) else source


def is_laid_out_as(one: fx.Node, other: Any) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


def _is_all_of(view: Any, tensor: Any) -> bool:
    """Whether `view`, of the same storage as `tensor`, shows all of it as it is."""
    if view is tensor:
        return True
    if not isinstance(view, fx.Node) or not isinstance(tensor, fx.Node):
        return False
    a, b = view.meta["val"], tensor.meta["val"]
    mine, theirs = ((t.storage_offset(), t.is_conj(), t.is_neg()) for t in (a, b))
    return storage_key(a) == storage_key(b) and mine == theirs and is_laid_out_as(view, tensor)


def _is_split(node: fx.Node) -> bool:
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return len(returns) == 1 and returns[0].alias_info is not None and not is_view(node)


def _scatter(part: fx.Node, view: fx.Node) -> fx.Node | None:
    """What puts `part`, written in the place of `view`, back into the whole."""
    users = list(part.users)
    if len(users) != 1 or len(users[0].args) < 2:
        return None
    (scatter,) = users
    # A trace makes the views of a tensor again once it was written to.
    if not _is_all_of(scatter.args[0], _whole_of(view)) or scatter.args[1] is not part:
        return None
    if not is_getitem(view):
        is_inverse = scatter.target is _SCATTER_OF.get(view.target)  # pyright: ignore
        return scatter if is_inverse and scatter.args[2:] == view.args[1:] else None
    # A trace puts a part of a split back as a slice.
    if scatter.target is not aten.slice_scatter.default or len(scatter.args) != 5:
        return None
    whole, (dim, start) = _whole_of(view).meta["val"], scatter.args[2:4]
    offset = whole.storage_offset() + start * whole.stride(dim)
    return scatter if view.meta["val"].storage_offset() == offset else None


# Sums that eager adds up in place, without recording it: gradients that a forward makes by chunks,
# or of what is used several times. A trace has such a sum twice while one addition runs. None of
# these ops may run twice. So it is done where that costs nothing: where what is written to was made
# for it, or is the first term; outside of what autograd records; if nobody reads the sum before.

BEGUN = "what follows writes to its result in place"
WRITES = "it writes in place"
_ADD = {"add", "sub", "addmm", "addbmm", "baddbmm", "addmv", "addr", "addcmul", "index_add"}


@dataclass
class InPlace:
    # The node that makes what is written to, and the tensor before the first write.
    begins: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    # For each node that writes, the op that does so in place.
    targets: dict[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])
    # For each tensor after a write, the tensor before it, of the same storage.
    before: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    # For each node that writes to a part, those that put it back into the whole in a trace.
    scattered: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)

    def why_no_recompute(self, write: fx.Node) -> str:
        # Not if the term is a view: the engine adds only to what nothing else holds.
        is_first = _is_sum_of_autograd(write) and is_view(write.all_input_nodes[0])
        return WRITES_FIRST if is_first else WRITES

    def last(self, first: fx.Node) -> fx.Node:
        after = {before: node for node, before in self.before.items()}
        while first in after:
            first = after[first]
        return first


def writes_in_place(nodes: Sequence[fx.Node], in_forward: Collection[fx.Node]) -> InPlace:
    found = InPlace()
    known: set[fx.Node] = set()
    by_autograd = {n for n in nodes if n not in in_forward and _is_sum_of_autograd(n)}
    for node in nodes:
        if node not in known and has_own_storage(node):
            # A picked result is itself the base of its value (`_add_name` in build.py).
            first = node if is_getitem(node) else as_written(node)
            writers = in_forward if node in in_forward else by_autograd
            before = first
            while (write := only_write(before, _in_place)) is not None and write.node in writers:
                # torch 2.11 does not tell of terms.
                to_term = WRITTEN_KEY in _annotations(node) and _op_called(write.node) in _ADD
                if not (is_made_for_writes(node) or _is_sum_of_autograd(write.node) or to_term):
                    break
                found.begins[node] = first
                found.targets[write.node] = write.target
                found.before[write.result] = before
                found.scattered[write.node] = write.scattered
                known.update((write.node, *write.scattered))
                before = write.result
    return found


def _annotations(node: fx.Node) -> Any:
    return node.meta.get("custom", {})


def _in_place(node: fx.Node) -> Any:
    if _is_sum_of_autograd(node):
        return aten.add_.Tensor
    return written_by_eager(node) if WRITTEN_KEY in _annotations(node) else None


def written_by_eager(node: fx.Node) -> Any:
    op, said = in_place_form(node), _annotations(node)
    written = said.get(WRITTEN_KEY, said.get(RECORDED_KEY))
    return op if op is not None and str(op) == written else None


def _is_sum_of_autograd(node: fx.Node) -> bool:
    # Autograd's engine adds in place if it records nothing and nothing else holds the first term
    # (`can_accumulate_inplace` of torch's csrc/autograd/input_buffer.cpp; see `only_write`).
    is_sum = node.meta.get("is_gradient_acc", False) and WRITTEN_KEY in _annotations(node)
    return is_sum and node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs
