"""Views of views that a graph can do without.

Autograd's backward formulas transpose what forward transposed, and reshape what it reshaped. In C++
a view costs next to nothing; from Python each is a call. If a view has the geometry of a tensor
that it goes back to, it is that tensor. A reshape of a reshape is one reshape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten._unsafe_view.default)
_VIEWS = (*_RESHAPES, aten.t.default, aten.transpose.int, aten.permute.default)


def leave_out_views(graph: fx.Graph) -> None:
    """Replace the reads of needless views in place; what the graph returns stays as it is."""
    returned = set(graph.find_nodes(op="output")[0].all_input_nodes)
    for node in list(graph.nodes):
        if not _is_view(node) or node in returned:
            continue
        same = _same_before(node)
        if same is not None:
            node.replace_all_uses_with(same)
        else:
            _skip_reshape(node)
    for node in reversed(list(graph.nodes)):
        if _is_view(node) and not node.users:
            graph.erase_node(node)


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _VIEWS


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _geometry(node: fx.Node) -> tuple[Any, ...]:
    tensor: Tensor = node.meta["val"]
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _same_before(node: fx.Node) -> fx.Node | None:
    """The nearest tensor that the view goes back to and equals, if there is one."""
    wanted, source = _geometry(node), _source(node)
    while _geometry(source) != wanted:
        if not _is_view(source):
            return None
        source = _source(source)
    return source


def _skip_reshape(node: fx.Node) -> None:
    """Let a reshape of a reshape read what the first one reads, if the result is the same."""
    while node.target in _RESHAPES and _source(node).target in _RESHAPES:
        base = _source(_source(node))
        if not base.meta["val"].is_contiguous():
            return
        node.update_arg(0, base)
