"""Fewer calls for the same kernels: views that show nothing new, and linears in one call.

Views take no time on a device, but each call takes the host a microsecond or two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.joint.nodes import aten
from remat.graph_capture.torch_private.core import OpWatcher
from remat.rewriter.graphs.eager import RESHAPES

# Autograd's formulas transpose what forward transposed, and each view is a call. One with the
# geometry of a tensor that it goes back to is that tensor; a reshape of a reshape is one reshape.

_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)
_VIEWS = (*RESHAPES, *_TRANSPOSES)


def leave_out_views(graph: fx.Graph, n_results: int | None = None) -> None:
    """Of what is returned, the first `n_results` stay, as they may be views to autograd."""
    output = graph.output_node()
    returned: Any = output.args[0]
    stays = {one for one in returned[:n_results] if isinstance(one, fx.Node)} if n_results else {}
    for node in list(graph.nodes):
        if not _is_view(node) or node in stays:
            continue
        if (same := _same_before(node)) is not None:
            if output not in node.users or _is_made_here_alone(same, output):
                node.replace_all_uses_with(same)
            continue
        while node.target in RESHAPES and _source(node).target in RESHAPES:
            base = _source(_source(node))
            if not base.meta["val"].is_contiguous():  # else there may be no such view
                break
            node.update_arg(0, base)
    for node in reversed(list(graph.nodes)):
        if _is_view(node) and not node.users:
            graph.erase_node(node)


def _is_made_here_alone(node: fx.Node, output: fx.Node) -> bool:
    # A tensor that is returned twice would be copied, and an input is somebody else's.
    return node.op == "call_function" and output not in node.users


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
    wanted, source = _geometry(node), _source(node)
    while _geometry(source) != wanted:
        if not _is_view(source):
            return None
        source = _source(source)
    return source


# `F.linear` of a batch is a view, a transpose, a product and a view, each a call of Python's, where
# one call runs the same in C++. It is taken where it does, which fakes show.

_PRODUCTS = {aten.addmm.default: 3, aten.mm.default: 2}


def join_linears(forward: fx.Graph, backward: fx.Graph, n_results: int) -> None:
    results: Any = forward.output_node().args[0]
    given, saved = set(results[:n_results]), results[n_results:]
    taken = backward.find_nodes(op="placeholder")
    for node in _products(forward):
        readers = [taken[i] for i, one in enumerate(saved) if one is node]
        users = [user for one in (node, *readers) for user in one.users if user.op != "output"]
        if node not in given and (made := _joined(node, users)):
            for reader in readers:
                reader.meta["val"] = made.meta["val"]
    for node in _products(backward):
        _joined(node, list(node.users))
    leave_out_views(forward, n_results)
    leave_out_views(backward)


def _products(graph: fx.Graph) -> list[fx.Node]:
    found = (node for node in graph.nodes if node.target in _PRODUCTS and not node.kwargs)
    return [n for n in found if len(n.args) == _PRODUCTS[n.target] and _is_turned(n.args[-1])]


def _is_turned(weight: Any) -> bool:
    return weight.target is aten.t.default


def _joined(node: fx.Node, users: list[fx.Node]) -> fx.Node | None:
    """The linear in the place of a product; None where that would run something else."""
    *bias, rows, turned = node.args
    assert isinstance(rows, fx.Node)
    assert isinstance(turned, fx.Node)
    weight, of_batch = _source(turned), rows.target in RESHAPES
    if of_batch and all(user.target in RESHAPES for user in users):  # they show it in any form
        batch, n_in = _source(rows), weight.meta["val"].shape[-1]
        if batch.meta["val"].shape[-1:] == (n_in,) and (
            made := _linear(node, (batch, weight, *bias), [rows, turned, node], 1)
        ):
            return made
    return _linear(node, (rows, weight, *bias), [turned, node], 0)


def _linear(
    node: fx.Node, given: tuple[Any, ...], replaced: list[fx.Node], n_more: int
) -> fx.Node | None:
    """In the place of `node`, if it runs what the nodes `replaced` do, and `n_more` views."""
    watcher = _Calls()
    with torch.no_grad(), watcher:
        val = aten.linear.default(*(one.meta["val"] for one in given))
    more = list(watcher.seen)
    for one in replaced:
        call = one.target, *_geometry(one)
        if call not in more:
            return None
        more.remove(call)
    if len(more) != n_more or any(target not in RESHAPES for target, *_ in more):
        return None
    with node.graph.inserting_before(node):
        made = node.graph.call_function(aten.linear.default, given)
    made.meta = dict(node.meta) | {"val": val}
    node.replace_all_uses_with(made)
    for one in reversed(replaced):
        if not one.users:
            node.graph.erase_node(one)
    return made


class _Calls(OpWatcher):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            self.seen.append((func, made.shape, made.stride(), made.storage_offset()))
        return made
