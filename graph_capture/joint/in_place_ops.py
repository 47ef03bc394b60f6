"""A tensor that is made only to be written to is made and written to by one op.

So are gradients of picked elements: eager writes into zeros, where a trace has zeros and a copy of
them at once. As one op the two take what eager takes, and may run again. It is done where nothing
else reads what is written to, where eager has run the form in place (or the tensor is of equal
numbers or none), and where nothing is held for longer than in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from remat.graph_capture.graph import JOINED
from remat.graph_capture.joint.eager_memory import is_held_past
from remat.graph_capture.joint.in_place_writes import (
    InPlace,
    Write,
    as_written,
    has_own_storage,
    in_place_form,
    is_laid_out_as,
    is_made_for_writes,
    only_write,
    reads_of,
    written_by_eager,
)
from remat.graph_capture.joint.nodes import (
    aten,
    draws_randomness,
    erase_unread,
    is_getitem,
    is_view,
    mutates,
    storage_key,
    target_name,
    tensors_of,
)
from remat.graph_capture.torch_private.core import OpOverload, pytree

# A node that runs several ops has one argument a step, ``(args, kwargs)``. A text that begins with
# `_MADE` stands for what an earlier step has made: fx can write that into code.

_MADE = "remat.made_by_step_"
STEP_METAS = "remat_step_metas"  # on meta: that of the node behind each op that runs as one


@dataclass(frozen=True)
class JoinedOp:
    op: Any  # of the trace
    in_place: Any = None  # runs in place of `op`
    is_whole: bool = False  # nothing runs: the first argument is the result

    @property
    def is_view(self) -> bool:
        schema = getattr(self.op, "_schema", None)  # one of a list of views is picked without
        return schema is None or any(r.alias_info is not None for r in schema.returns)


@dataclass(frozen=True)
class JoinedTarget:
    steps: tuple[JoinedOp, ...]

    def __call__(self, *calls: Any) -> Any:
        return self.carried_out(calls, lambda _, step, args, kwargs: _carry_out(step, args, kwargs))

    def carried_out(
        self, calls: Sequence[Any], run: Callable[[int, JoinedOp, tuple[Any, ...], Any], Any]
    ) -> Any:
        """Have `run` carry out each step, given its index and its arguments; the last result."""
        made: list[Any] = []
        for i, (step, (args, kwargs)) in enumerate(zip(self.steps, calls, strict=True)):
            # What is written to, and a part of it, are arguments of their own, never in a list.
            given = tuple(made[int(a.removeprefix(_MADE))] if _is_made(a) else a for a in args)
            made.append(run(i, step, given, dict(kwargs)))
        return made[-1]

    @property
    def __name__(self) -> str:
        """The names of its ops, but for views and for what only follows a write to a part."""
        named = (step.op for step in self.steps if not (step.is_view or step.is_whole))
        return JOINED.join(map(str, named))


def _is_made(argument: Any) -> bool:
    return isinstance(argument, str) and argument.startswith(_MADE)


def joined_op_names(node: fx.Node) -> tuple[str, ...]:
    if isinstance(node.target, JoinedTarget):
        return tuple(str(step.op) for step in node.target.steps)
    return (target_name(node),)


def calls_of(node: fx.Node) -> tuple[Any, ...]:
    """What each of `joined_op_names` is called with."""
    return node.args if isinstance(node.target, JoinedTarget) else ((node.args, node.kwargs),)


def _carry_out(step: JoinedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if step.is_whole else (step.in_place or step.op)(*args, **kwargs)


def _join_members(members: Sequence[fx.Node], steps: Sequence[JoinedOp]) -> None:
    """Let the last of `members` do what all do, by `steps`. Nothing else may read the others."""
    index = {node: i for i, node in enumerate(members)}
    *others, last = members

    def given(node: fx.Node) -> tuple[Any, Any]:
        call = tuple(node.args), tuple(node.kwargs.items())
        return pytree.tree_map_only(
            fx.Node, lambda one: f"{_MADE}{index[one]}" if one in index else one, call
        )

    calls = tuple(map(given, members))
    last.meta[STEP_METAS] = [dict(node.meta) for node in members]  # copies: it would hold itself
    last.target, last.args, last.kwargs = JoinedTarget(tuple(steps)), calls, {}
    for node in reversed(others):
        node.graph.erase_node(node)  # readers first: fx erases no node that is still read


def join_writes(graph: fx.Graph, in_forward: Collection[fx.Node], sums: InPlace) -> None:
    """`sums` are added up in place otherwise, and stay as they are."""
    apart = {*sums.targets, *sums.before}
    apart.update(node for scattered in sums.scattered.values() for node in scattered)
    for node in list(graph.nodes):
        begins = node.op == "call_function" and node not in apart and node not in sums.begins
        begins = begins and _is_plain(node) and not is_getitem(node) and has_own_storage(node)
        # Flops are looked up by what a node calls, so a joined product would count none.
        is_counted = getattr(node.target, "overloadpacket", None) in flop_registry
        if begins and not is_counted and (writes := list(_writes_after(node, in_forward, apart))):
            _join(node, writes)


def _is_plain(node: fx.Node) -> bool:
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
    form = _any_form if is_empty else written_by_eager  # into equal numbers any op may write
    while (write := only_write(tensor, form, lambda n: bool(written_by_eager(n)))) is not None:
        is_alike = _is_plain(write.node) and (write.node in in_forward) == (node in in_forward)
        # One op has one phase, and what `sums` has taken is changed by its own rules.
        if not is_alike or not apart.isdisjoint((write.node, write.result)):
            return
        # It reads nothing that the write does not, so made late it holds nothing for longer.
        reads_no_more = _storages_read(node) <= _storages_read(write.node)
        is_free = before is node and is_empty and reads_no_more
        runs_on = is_free or _runs_next(before, write.node, in_forward)
        if not runs_on and not _is_held_anyway(members, write):
            return
        yield write
        members += [write.node, *write.scattered]
        before, tensor = write.result, as_written(write.result)


def _any_form(node: fx.Node) -> Any:
    """The op in place that does what `node` does, if it takes the same arguments."""
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):  # else it makes another tensor
        return written_by_eager(node)
    op = in_place_form(node)
    if op is None or torch.Tag.inplace_view in op.tags or not _is_plain(node) or is_view(node):
        return None
    target: Any = node.target
    taken, given = ([one.name for one in of._schema.arguments] for of in (op, target))
    return op if taken == given else None


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
        is_alike = between.op == "call_function" and (between in in_forward) == (node in in_forward)
        if is_alike and not _storages_of(between) <= _storages_read(between):
            return False
        between = between.next
    return True


def _join(node: fx.Node, writes: list[Write]) -> None:
    steps: dict[fx.Node, JoinedOp] = {}
    for write in writes:
        steps[write.node] = JoinedOp(write.node.target, in_place=write.target)
        steps |= {one: JoinedOp(one.target, is_whole=True) for one in write.scattered}
    result = writes[-1].result
    members = {node, *steps}
    for tensor in (node, *(write.result for write in writes[:-1])):
        members |= reads_of(tensor)[1]
    erase_unread(*(one for one in members if not one.users))  # views that nothing reads any more
    order = [node]
    while order[-1] is not result:
        order.append(order[-1].next)
    order = [one for one in order if one in members]
    _join_members(order, [steps.get(one) or JoinedOp(one.target) for one in order])


# A write that autograd records goes backward in a copy of the gradient: eager copies the written
# part out, then writes there. A trace would copy the whole once more, as the part is read between.
# The part is the same in the gradient itself, which eager holds meanwhile.

_OF_ANY_LAYOUT = frozenset(  # views that show the same numbers however their tensor is laid out
    {
        aten.slice.Tensor, aten.select.int, aten.diagonal.default, aten.transpose.int,
        aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.t.default,
        aten.alias.default,
    }
)  # fmt: skip


def read_past_copies(graph: fx.Graph) -> None:
    """Let nodes read what was copied instead of the copy, where eager has both."""
    for copy in graph.find_nodes(op="call_function", target=aten.copy.default):
        _copy_conjugate_at_once(copy)
        written = copy.args[1]
        if not isinstance(written, fx.Node):
            continue
        a, b = copy.meta["val"], written.meta["val"]
        is_same = (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        if is_same and not (b.is_conj() or b.is_neg()):
            for read in list(_reads_before_write(copy, written)):
                _read_from(read, copy, written)


def _copy_conjugate_at_once(copy: fx.Node) -> None:
    made = copy.args[1]
    if not isinstance(made, fx.Node) or made.target is not aten.clone.default or made.kwargs:
        return
    (source,) = made.all_input_nodes
    value = source.meta["val"]
    # Eager copies a conjugate into a tensor at once; a trace makes the conjugate first.
    if (value.is_conj() or value.is_neg()) and list(made.users) == [copy]:
        copy.replace_input_with(made, source)
        erase_unread(made)


def _reads_before_write(copy: fx.Node, written: fx.Node) -> Iterator[fx.Node]:
    """Views of `copy` of which a part is copied before eager writes to it and lets `written` go."""
    readers = reads_of(copy)[0]
    writes = [node for node in readers if written_by_eager(node) is not None]
    if len(writes) != 1 or not is_held_past(written, writes[0]):
        return
    for node in readers:
        is_packed = node.kwargs.get("memory_format") is torch.contiguous_format
        if node.target is aten.clone.default and is_packed and node < writes[0]:
            yield node


def _read_from(reader: fx.Node, copy: fx.Node, written: fx.Node) -> None:
    (view,) = reader.all_input_nodes
    a, b = copy.meta["val"], written.meta["val"]
    as_copy = is_laid_out_as(copy, written) and a.storage_offset() == b.storage_offset()
    shown: Any = view
    while shown is not copy:
        # Other views, as as_strided, go by places in the storage.
        if not is_view(shown) or not (as_copy or shown.target in _OF_ANY_LAYOUT):
            return
        shown = shown.args[0]
    with reader.graph.inserting_before(reader):
        reader.replace_input_with(view, _shown_in(view, copy, written))
    erase_unread(view)


def _shown_in(view: Any, copy: fx.Node, written: fx.Node) -> fx.Node:
    if view is copy:
        return written
    source, *more = view.args
    args = (_shown_in(source, copy, written), *more)
    node = view.graph.call_function(view.target, args, dict(view.kwargs))
    node.meta = dict(view.meta)
    values = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (args, dict(view.kwargs)))
    with values[0][0].fake_mode:
        node.meta["val"] = view.target(*values[0], **values[1])
    return node
