"""Linear layers in a joint graph, and nodes behind names and other shapes of them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from remat.graph_capture.joint.nodes import aten

# Label smoothing around a head's loss: what it reads of the probabilities, and what it hands back.
#
# It adds the sum of each row's logarithms to the loss. That sum is made by a chunk too. All else
# that label smoothing does has one number a row, and stays as captured.


SHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


@dataclass(frozen=True)
class Smoothing:
    """The nodes of label smoothing that have a number for each row and class."""

    row_sum: fx.Node  # sums of all rows, (m,)
    row_term: fx.Node  # the gradient of these, (m, 1)
    total: fx.Node  # adds its part to that of the loss
    forward: tuple[fx.Node, ...]  # only serve these, each before those that read it
    backward: tuple[fx.Node, ...]


def find_smoothing(
    readers: Sequence[fx.Node], of_softmax: fx.Node, of_loss: fx.Node, class_weight: Any
) -> Smoothing | None:
    """The label smoothing among `readers` of the log-probabilities; None if none is known.

    `of_softmax` and `of_loss` are the nodes of the softmax's and of the loss's backward.
    """
    total = of_softmax.args[0]
    if not isinstance(total, fx.Node) or not _reads(total, aten.add.Tensor, of_loss):
        return None
    part = next(one for one in total.args if one is not of_loss)
    scaled = _unscaled(part, class_weight)
    summed = [_summed(reader, class_weight) for reader in readers]
    found = [one for one in summed if one is not None]
    if scaled is None or len(found) != 1 or list(total.users) != [of_softmax]:
        return None
    expanded, *back = scaled
    row_term = expanded.args[0]
    if expanded.target is not aten.expand.default or not isinstance(row_term, fx.Node):
        return None
    n_rows = of_softmax.meta["val"].shape[0]
    if list(row_term.meta["val"].shape) != [n_rows, 1] or len(expanded.users) != 1:
        return None
    return Smoothing(found[0][-1], row_term, total, found[0], (expanded, *back, total))


def identity_of(argument: Any) -> Any:
    # Several nodes may read one constant.
    if not isinstance(argument, fx.Node):
        return argument
    return str(argument.target) if argument.op == "get_attr" else argument.name


def _reads(node: fx.Node, target: Any, read: fx.Node) -> bool:
    return node.target is target and not node.kwargs and node.args.count(read) == 1


def _unscaled(part: Any, class_weight: Any) -> tuple[fx.Node, ...] | None:
    """What is multiplied by class weights, and the product; itself without; None otherwise."""
    if not isinstance(part, fx.Node):
        return None
    if class_weight is None:
        return (part,)
    if part.target is not aten.mul.Tensor or len(part.users) != 1:
        return None
    scale, node = part.args[1], part.args[0]
    if not isinstance(scale, fx.Node) or not isinstance(node, fx.Node):
        return None
    is_weight = scale.target in SHAPES and identity_of(scale.args[0]) == identity_of(class_weight)
    return (node, part) if is_weight and scale.meta["val"].dim() == 2 else None


def _summed(reader: fx.Node, class_weight: Any) -> tuple[fx.Node, ...] | None:
    """The nodes from the logarithms to the sum of each row, where `reader` begins one."""
    nodes = (reader,)
    if class_weight is not None:
        if _unscaled(reader, class_weight) is None:
            return None
        scale: Any = reader.args[1]
        nodes = (scale, reader, next(iter(reader.users)))
    last = nodes[-1]
    is_sum = last.target is aten.sum.dim_IntList and list(last.args[1:]) in ([[1]], [[1], False])
    return nodes if is_sum and not last.kwargs else None


PRODUCTS = (aten.mm.default, aten.addmm.default)
_NAMES = (*SHAPES, aten.detach.default)


class NoMlpError(Exception):
    """What looks like an MLP is none that can run in chunks."""


class Linear(NamedTuple):
    product: fx.Node
    x: fx.Node
    weight: fx.Node  # (out, in)
    bias: fx.Node | None


def linear_above(node: Any) -> Linear:
    """The layer whose result `node` is, in another shape at most."""
    product = sources_of(node)[-1]
    found = linear_of(product)
    if found is None:
        raise NoMlpError
    return found


def linear_of(product: fx.Node) -> Linear | None:
    if product.target not in PRODUCTS or product.kwargs:
        return None
    bias, x, weight = (None, *product.args) if len(product.args) == 2 else product.args[:3]
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    if weight.target is not aten.t.default or len(product.args) > 3:
        return None
    if bias is not None and (not isinstance(bias, fx.Node) or bias.meta["val"].dim() != 1):
        return None
    source = weight.args[0]
    assert isinstance(source, fx.Node)
    return Linear(product, x, source, bias)


def linear_below(node: fx.Node) -> Linear | None:
    """The one layer that is given `node`, in another shape at most."""
    names = aliases_of(node)
    found = [
        layer
        for one in names
        for user in one.users
        if (layer := linear_of(user)) is not None and layer.x is one
    ]
    return found[0] if len(found) == 1 else None


def sources_of(node: Any) -> list[fx.Node]:
    """`node`, and what it is another shape or name of."""
    if not isinstance(node, fx.Node):
        raise NoMlpError
    found = [node]
    while found[-1].target in _NAMES:
        above = found[-1].args[0]
        assert isinstance(above, fx.Node)
        found.append(above)
    return found


def aliases_of(node: fx.Node) -> list[fx.Node]:
    """`node`, and nodes that are it in another shape or under another name."""
    own = [user for user in node.users if user.target in _NAMES]
    return [node, *(alias for user in own for alias in aliases_of(user))]


def readers_of(node: Any) -> list[fx.Node]:
    if not isinstance(node, fx.Node):
        raise NoMlpError
    names = aliases_of(node)
    return list(dict.fromkeys(u for one in names for u in one.users if u not in names))


def the_only(found: Iterator[fx.Node]) -> fx.Node:
    nodes = list(dict.fromkeys(found))
    if len(nodes) != 1:
        raise NoMlpError
    return nodes[0]


def behind_transposes(node: Any) -> fx.Node | None:
    """The tensor that an even number of transposes leads to."""
    n_transposes = 0
    while isinstance(node, fx.Node) and node.target is aten.t.default:
        node, n_transposes = node.args[0], n_transposes + 1
    return node if isinstance(node, fx.Node) and n_transposes % 2 == 0 else None


def picked(node: fx.Node, i: int, name: str, before: fx.Node | None = None) -> fx.Node:
    graph = node.graph
    with graph.inserting_before(before) if before is not None else graph.inserting_after(node):
        made = graph.create_node("call_function", operator.getitem, (node, i), {}, name)
    made.meta = {**node.meta, "val": node.meta["val"][i]}
    return made


def replace_node(old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    # Under its name, so that the rest of the training graph stays as it is.
    name, meta = old.name, old.meta
    old.graph.erase_node(old)
    new.name = name
    # An op of ours has its own meta already.
    if new.target is operator.getitem:
        new.meta = dict(meta)


def replace_results(node: fx.Node, old: Iterable[fx.Node | None]) -> None:
    """Let results of `node` take the places of `old`, in their order; None has no place."""
    last = node
    for i, one in enumerate(old):
        if one is not None:
            # One of them may be what stands next, and goes as its place is taken.
            last = picked(node, i, one.name, before=last.next)
            replace_node(one, last)


def erase_unread_nodes(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    left = set(graph.nodes)  # those whose places were taken are gone
    for node in nodes:
        if node in left and not node.users:
            graph.erase_node(node)
