"""A tensor that is made only to be written to is made and written to by one op.

The gradient of an element that was picked is zeros with that element put there: of `gather`, of an
index, of `topk`, `sort` or `max`. Eager writes into the zeros. A trace has an op that makes them
and an op that makes a copy of them with the element, so that both are there while it runs. As one
op the two take what eager takes, and may run again.

So it is done where nothing else reads what is written to. Either it was made of equal numbers or
of none, and then any op may write there that has a form in place; or eager has run that form. And
nothing else runs in between, or eager holds meanwhile what the first ops read, so that none of it
is held for longer than in eager.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from remat.graph_capture.in_place.as_one import JoinedOp, join
from remat.graph_capture.in_place.sums import InPlace, written_by_eager
from remat.graph_capture.in_place.writes import (
    Write,
    as_written,
    has_own_storage,
    in_place_form,
    is_made_for_writes,
    only_write,
    reads_of,
)
from remat.graph_capture.joint.eager_memory import is_held_past
from remat.graph_capture.joint.nodes import (
    draws_randomness,
    erase_unread,
    is_getitem,
    is_view,
    mutates,
    storage_key,
    tensors_of,
)


def join_writes(graph: fx.Graph, in_forward: Collection[fx.Node], sums: InPlace) -> None:
    """Change each tensor of `graph` that is made only to be written to, and its writes, to one op.

    Parameters
    ----------
    in_forward : the nodes of forward. sums : those that are added up in place otherwise.
    """
    apart = {*sums.targets, *sums.before}
    apart.update(node for scattered in sums.scattered.values() for node in scattered)
    for node in list(graph.nodes):
        begins = node.op == "call_function" and node not in apart and node not in sums.begins
        if begins and _may_begin(node):
            writes = list(_writes_after(node, in_forward, apart))
            if writes:
                _join(node, writes)


def _may_begin(node: fx.Node) -> bool:
    """Whether it makes one tensor, by an op whose price does not hang on what it computes."""
    if not _is_plain(node) or is_getitem(node) or not has_own_storage(node):
        return False
    return getattr(node.target, "overloadpacket", None) not in flop_registry


def _is_plain(node: fx.Node) -> bool:
    """Whether it is an op of torch's that neither draws nor has effects."""
    target = node.target
    is_aten = isinstance(target, OpOverload) and target.namespace == "aten"
    return is_aten and not draws_randomness(node) and not mutates(node)


def _writes_after(
    node: fx.Node, in_forward: Collection[fx.Node], apart: set[fx.Node]
) -> Iterator[Write]:
    """The writes to what `node` makes, one after the other, that may run as one op with it."""
    is_empty = is_made_for_writes(node)
    before, tensor = node, as_written(node)
    members = [node]
    form = _any_form if is_empty else written_by_eager
    while (write := only_write(tensor, form, _is_eagers)) is not None:
        is_alike = _is_plain(write.node) and (write.node in in_forward) == (node in in_forward)
        if not is_alike or not apart.isdisjoint((write.node, write.result)):
            return
        is_free = before is node and is_empty and _reads_no_more(node, write)
        runs_on = is_free or _runs_next(before, write.node, in_forward)
        if not runs_on and not _is_held_anyway(members, write):
            return
        yield write
        members += [write.node, *write.scattered]
        before = tensor = write.result
        tensor = as_written(tensor)


def _any_form(node: fx.Node) -> Any:
    """The op in place that does what `node` does, if it takes the same arguments.

    Of an op that computes each element from those at its place, as a sum with zeros does, eager's
    own form counts: where it makes another tensor, the unmodified step has both.
    """
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return written_by_eager(node)
    op = in_place_form(node)
    if op is None or torch.Tag.inplace_view in op.tags or not _is_plain(node) or is_view(node):
        return None
    names = [argument.name for argument in op._schema.arguments]
    same = names == [argument.name for argument in node.target._schema.arguments]  # pyright: ignore
    return op if same else None


def _is_eagers(node: fx.Node) -> bool:
    """Whether eager writes in place there, whatever else it reads."""
    return written_by_eager(node) is not None


def _reads_no_more(node: fx.Node, write: Write) -> bool:
    """Whether `node` reads nothing that the write does not read as well."""
    return _storages_read(node) <= _storages_read(write.node)


def _is_held_anyway(members: Collection[fx.Node], write: Write) -> bool:
    """Whether eager holds until `write` what `members` read, so that they may run as late."""
    own = {key for member in members for key in _storages_of(member)}
    own |= _storages_read(write.node)
    read = (one for member in members for one in member.all_input_nodes)
    return all(is_held_past(n, write.node) for n in read if not _storages_of(n) <= own)


def _storages_of(node: fx.Node) -> set[int]:
    return {storage_key(tensor) for tensor in tensors_of(node) if tensor is not None}


def _storages_read(node: fx.Node) -> set[int]:
    return {key for read in node.all_input_nodes for key in _storages_of(read)}


def _runs_next(before: fx.Node, node: fx.Node, in_forward: Collection[fx.Node]) -> bool:
    """Whether no op of the same phase runs between the two. What makes no storage is no op."""
    between = before.next
    while between is not node:
        if between.op == "call_function" and (between in in_forward) == (node in in_forward):
            known = _storages_read(between)
            made = (t for t in tensors_of(between) if t is not None)
            if any(storage_key(tensor) not in known for tensor in made):
                return False
        between = between.next
    return True


def _join(node: fx.Node, writes: list[Write]) -> None:
    steps: dict[fx.Node, JoinedOp] = {}
    tensor = node
    for write in writes:
        steps[write.node] = JoinedOp(write.node.target, in_place=write.target)
        steps |= {one: JoinedOp(one.target, is_whole=True) for one in write.scattered}
    result = writes[-1].result
    members = {node, *steps}
    for tensor in (node, *(write.result for write in writes[:-1])):
        members |= reads_of(tensor)[1]
    erase_unread(*(one for one in members if not one.users))
    order = [one for one in _from(node, result) if one in members]
    join(order, [steps.get(one) or JoinedOp(one.target) for one in order])


def _from(node: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes of a graph from one to another."""
    while node is not last:
        yield node
        node = node.next
    yield last
