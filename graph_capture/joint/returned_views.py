"""Results that are views of one tensor: each has a gradient of its own, as in eager.

Where several results are views of one tensor, AOTAutograd returns that tensor, makes the views
again outside the step, and has autograd add up their gradients there: more memory than eager takes,
that no plan sees, and sums in another order. It makes an exception for views that came from one op,
as from `unbind`: those it returns as they are. So such an op is put behind each of the views while
the step is traced, and taken out of the graph again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from remat.graph_capture.joint.nodes import erase_unread, is_tangent, storage_key

aten = torch.ops.aten


def views_told_apart(results: Any) -> Any:
    """The results, with an op behind each of several views of one tensor of the graph."""
    leaves, spec = pytree.tree_flatten(results)
    distinct = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    viewed = {storage_key(leaf) for leaf in distinct.values() if _is_view_of_result(leaf)}
    sharing = Counter(storage_key(leaf) for leaf in distinct.values())
    told = {
        key: leaf.unsqueeze(0).unbind(0)[0]
        for key, leaf in distinct.items()
        if sharing[storage_key(leaf)] > 1 and storage_key(leaf) in viewed and not _is_base(leaf)
    }
    return pytree.tree_unflatten([told.get(id(leaf), leaf) for leaf in leaves], spec)


def _is_view_of_result(leaf: Tensor) -> bool:
    """Whether it is a view of what an op has made, and has a gradient."""
    return leaf.requires_grad and leaf._base is not None and leaf._base.grad_fn is not None


def _is_base(leaf: Tensor) -> bool:
    """Whether it is what others are views of. What is detached from it is a view too."""
    return leaf.requires_grad and leaf._base is None


def take_out_of(graph: fx.Graph) -> None:
    """Leave out the ops that `views_told_apart` has put in, and what backward does for them."""
    for node in graph.find_nodes(op="call_function", target=aten.unbind.int):
        made, picked = node.args[0], list(node.users)
        if _is_one_row(made) and len(picked) == 1:
            _replace(picked[0], made.args[0])
            erase_unread(node)
    copied: set[fx.Node] = set()
    for node in graph.find_nodes(op="call_function", target=aten.stack.default):
        stacked: Any = node.args[0]
        for user in list(node.users) if len(stacked) == 1 and is_tangent(stacked[0]) else ():
            if user.target is aten.squeeze.dim and user.args[1] == 0:
                _replace(user, stacked[0])
                copied.add(stacked[0])
                erase_unread(node)
    if copied:
        _lay_out_again(graph, copied)


def _is_one_row(node: Any) -> bool:
    is_unsqueezed = isinstance(node, fx.Node) and node.target is aten.unsqueeze.default
    return is_unsqueezed and node.args[1:] == (0,)


def _replace(node: fx.Node, by: Any) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _lay_out_again(graph: fx.Graph, changed: set[fx.Node]) -> None:
    """The facts of what is made of gradients that are no copies any more: their own strides."""
    for node in graph.nodes:
        if node.op != "call_function" or changed.isdisjoint(node.all_input_nodes):
            continue
        before: Any = node.meta["val"]
        args, kwargs = pytree.tree_map_only(
            fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs)
        )
        try:
            with _fake_mode_of(args):
                now = node.target(*args, **kwargs)
        except RuntimeError:  # no view in these strides: backward copies there, as eager does
            continue
        if _is_view(now, args) or not _is_alike(now, before):
            node.meta["val"] = now
            changed.add(node)


def _fake_mode_of(args: tuple[Any, ...]) -> Any:
    return next(t.fake_mode for t in pytree.tree_leaves(args) if isinstance(t, FakeTensor))


def _is_view(made: Any, args: tuple[Any, ...]) -> bool:
    read = {storage_key(t) for t in pytree.tree_leaves(args) if isinstance(t, Tensor)}
    return any(storage_key(t) in read for t in pytree.tree_leaves(made) if isinstance(t, Tensor))


def _is_alike(made: Any, before: Any) -> bool:
    pairs = zip(pytree.tree_leaves(made), pytree.tree_leaves(before), strict=True)
    return all(a.stride() == b.stride() for a, b in pairs if isinstance(a, Tensor))
