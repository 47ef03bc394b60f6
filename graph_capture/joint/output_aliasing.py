"""Results that are views of one tensor: each has a gradient of its own, as in eager.

AOTAutograd would return that tensor, make the views again outside the step, and have autograd add
up their gradients there: more memory, unseen by plans, and another order. Not for views of one op,
as `unbind`: so such an op is put behind each view for the trace, and taken out again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import CUSTOM, Phase
from remat.graph_capture.joint.exact_ops import CHOSEN_BACKWARD
from remat.graph_capture.joint.nodes import (
    TRIALS,
    argument,
    aten,
    draws_randomness,
    erase_unread,
    is_custom,
    is_tangent,
    storage_key,
    tensors_of,
)
from remat.graph_capture.joint.provenance import path_in_model
from remat.graph_capture.torch_private.core import FakeTensor, pytree


def views_told_apart(results: Any) -> Any:
    """The results, with an op behind each of several views of one tensor of the graph."""
    leaves, spec = pytree.tree_flatten(results)
    distinct = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    viewed = {
        storage_key(leaf)
        for leaf in distinct.values()
        if leaf.requires_grad and leaf._base is not None and leaf._base.grad_fn is not None
    }
    sharing = Counter(storage_key(leaf) for leaf in distinct.values())
    told = {
        key: leaf.unsqueeze(0).unbind(0)[0]  # AOTAutograd returns views of such an op as they are
        for key, leaf in distinct.items()
        if sharing[storage_key(leaf)] > 1 and storage_key(leaf) in viewed
        if not (leaf.requires_grad and leaf._base is None)  # detached ones have no base either
    }
    return pytree.tree_unflatten([told.get(id(leaf), leaf) for leaf in leaves], spec)


def take_out_of(graph: fx.Graph) -> None:
    """Leave out the ops that `views_told_apart` has put in, and what backward does for them."""
    for node in graph.find_nodes(op="call_function", target=aten.unbind.int):
        made, picked = node.args[0], list(node.users)
        if not isinstance(made, fx.Node) or made.target is not aten.unsqueeze.default:
            continue
        if made.args[1:] == (0,) and len(picked) == 1:
            _replace(picked[0], made.args[0])
            erase_unread(node)
    copied: set[fx.Node] = set()
    # The backward of `unsqueeze(0).unbind(0)` is `squeeze(stack([tangent]))`.
    for node in graph.find_nodes(op="call_function", target=aten.stack.default):
        stacked: Any = node.args[0]
        for user in list(node.users) if len(stacked) == 1 and is_tangent(stacked[0]) else ():
            if user.target is aten.squeeze.dim and user.args[1] == 0:
                _replace(user, stacked[0])
                copied.add(stacked[0])
                erase_unread(node)
    if copied:  # `stack` packed the tangent; as it is, strides may differ
        lay_out_again(graph, copied)


def _replace(node: fx.Node, by: Any) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def lay_out_again(graph: fx.Graph, changed: set[fx.Node]) -> None:
    """Recompute the facts of what is made of nodes that have changed."""
    for node in graph.nodes:
        if node.op != "call_function" or changed.isdisjoint(node.all_input_nodes):
            continue
        before: Any = node.meta["val"]
        given = node.args, node.kwargs
        args, kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], given)
        leaves = pytree.tree_leaves(args)
        try:
            with next(t.fake_mode for t in leaves if isinstance(t, FakeTensor)):
                now = node.target(*args, **kwargs)
        except RuntimeError:  # no view in these strides: backward copies there, as eager does
            continue
        # A view shares its storage with its new source, even if its strides are the same.
        read = {storage_key(t) for t in leaves if isinstance(t, Tensor)}
        pairs = zip(pytree.tree_leaves(now), pytree.tree_leaves(before), strict=True)
        tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor)]
        if any(storage_key(a) in read or a.stride() != b.stride() for a, b in tensors):
            node.meta["val"] = now
            changed.add(node)


# Which ops must not run twice, and why.


def why_no_recompute(
    node: fx.Node, phase: Phase, inputs: Sequence[str], overwritten: Mapping[str, str],
    place: tuple[str, str],
) -> str:  # fmt: skip
    """Empty if the op of `node` may run twice. `place`: module and line. CaptureError if it reads
    in backward what forward overwrites."""
    for name in inputs:
        if name in overwritten and phase == "forward":
            return f"it reads {overwritten[name]}, which the step overwrites"
        if name in overwritten:
            module, source = place
            raise CaptureError(
                "give forward a copy, x.clone(), before the change: backward of module "
                f"{module or '(root)'} ({source}) reads {overwritten[name]}, which forward "
                "overwrites"
            )
    if argument(node, "generator") is not None:
        return "it draws from a generator of its own"
    if node.target is CHOSEN_BACKWARD:  # cuDNN's
        return "it may write to memory that its forward has reserved"
    if draws_randomness(node) and phase == "backward":
        return "it draws random numbers in backward"
    if all(t is None for t in tensors_of(node)):
        return "it only has side effects"
    return why_custom(node)


def why_custom(node: fx.Node) -> str:
    """Why a custom op must not run twice unless the user asks for it; empty for other ops."""
    if not is_custom(node) or draws_randomness(node):  # tagged ones draw again from the saved state
        return ""
    why = TRIALS.get(node.target, "may draw or act without a tag")
    return f"{CUSTOM}: {why}. It runs again only if recompute names its module" if why else ""


def overwritten_values(nodes: Sequence[fx.Node], inputs: Sequence[Any]) -> dict[str, str]:
    """Resident values that the step overwrites, with users' names for them. `inputs`: for each
    result of forward the input that it overwrites, or None."""
    overwritten = {what for what in inputs if what is not None}
    return {
        node.name: path_in_model(str(getattr(node.meta["desc"], "target", node.name)))
        for node in nodes
        if node.op == "placeholder" and node.meta.get("desc") in overwritten
    }
