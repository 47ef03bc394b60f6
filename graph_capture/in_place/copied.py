"""What a write in place reads, without the copies that a trace adds or makes others wait for.

A write that autograd records goes backward in a copy of the gradient: eager copies the written part
of that out of it, and then writes there. A trace would copy the whole once more, as the part is
read in between. The part is the same in the gradient itself, which eager holds meanwhile, so it is
read from there, and nothing but writes reads the copy.

And where eager copies the conjugate of a tensor into another, a trace makes that conjugate first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from remat.graph_capture.in_place.sums import written_by_eager
from remat.graph_capture.in_place.writes import is_laid_out_as, reads_of
from remat.graph_capture.joint.eager_memory import is_held_past
from remat.graph_capture.joint.nodes import erase_unread, is_view

aten = torch.ops.aten

_OF_ANY_LAYOUT = frozenset(
    {
        aten.slice.Tensor, aten.select.int, aten.diagonal.default, aten.transpose.int,
        aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.t.default,
        aten.alias.default,
    }
)  # fmt: skip
"""Views that show the same numbers however their tensor is laid out."""


def read_past_copies(graph: fx.Graph) -> None:
    """Let the nodes of `graph` read what was copied instead of the copy, where eager has both."""
    for copy in graph.find_nodes(op="call_function", target=aten.copy.default):
        _copy_conjugate_at_once(copy)
        written = copy.args[1]
        if isinstance(written, fx.Node) and _is_copy_of(copy, written):
            for read in list(_reads_before_write(copy, written)):
                _read_from(read, copy, written)


def _copy_conjugate_at_once(copy: fx.Node) -> None:
    made = copy.args[1]
    if not isinstance(made, fx.Node) or made.target is not aten.clone.default or made.kwargs:
        return
    (source,) = made.all_input_nodes
    value = source.meta["val"]
    if (value.is_conj() or value.is_neg()) and list(made.users) == [copy]:
        copy.replace_input_with(made, source)
        erase_unread(made)


def _is_copy_of(copy: fx.Node, written: fx.Node) -> bool:
    """Whether the two have the same numbers, and a device in common."""
    a, b = copy.meta["val"], written.meta["val"]
    same = (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
    return same and not (b.is_conj() or b.is_neg())


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
    """Let `reader` read the view of `written` that it has of `copy`, if there is one."""
    (view,) = reader.all_input_nodes
    as_copy = _has_same_places(copy, written)
    shown: Any = view
    while shown is not copy:
        if not is_view(shown) or not (as_copy or shown.target in _OF_ANY_LAYOUT):
            return
        shown = shown.args[0]
    with reader.graph.inserting_before(reader):
        reader.replace_input_with(view, _shown_in(view, copy, written))
    erase_unread(view)


def _has_same_places(copy: fx.Node, written: fx.Node) -> bool:
    a, b = copy.meta["val"], written.meta["val"]
    return is_laid_out_as(copy, written) and a.storage_offset() == b.storage_offset()


def _shown_in(view: Any, copy: fx.Node, written: fx.Node) -> fx.Node:
    """`view`, a view of `copy`, as one of `written`."""
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
