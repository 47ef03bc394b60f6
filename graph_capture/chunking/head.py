"""Linear heads with a cross-entropy in a joint graph: where they are, or why one cannot be chunked.

A head is a product with the transposed weight, then nodes that change the shape, take rows or
convert, then `_log_softmax` and `nll_loss_forward`; and their backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, fx

from remat.graph_capture.chunking.linear_layers import (
    PRODUCTS,
    SHAPES,
    Smoothing,
    behind_transposes,
    find_smoothing,
    identity_of,
)
from remat.graph_capture.joint.nodes import aten, is_getitem

_COPIES = (aten.clone.default, aten._to_copy.default)
_BACK = (*SHAPES, *_COPIES, aten.slice_backward.default)


class _NoHeadError(Exception):
    """Why what looks like a head cannot be chunked: the sentence goes on after its name."""


@dataclass
class Head:
    """One head with its loss, and the nodes that its forward and its backward consist of.

    Attributes
    ----------
    softmax : its `_log_softmax`. product : the node of all logits. loss : `nll_loss_forward`.
    weight : (classes, d).
    grid, start, stop : the logits' rows that the loss takes; empty for all.
    gradient : what backward hands to the loss.
    of_x, of_weight, of_bias : nodes that make the gradients, None where nobody needs one.
    forward, backward : nodes that only serve these, each before those that read it.
    """

    softmax: fx.Node
    product: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    loss: fx.Node
    grid: list[int] = field(default_factory=list[int])
    start: list[int] = field(default_factory=list[int])
    stop: list[int] = field(default_factory=list[int])
    gradient: fx.Node | None = None
    total_weight: fx.Node | None = None
    smoothing: Smoothing | None = None
    of_x: fx.Node | None = None
    of_weight: fx.Node | None = None
    of_bias: fx.Node | None = None
    forward: list[fx.Node] = field(default_factory=list[fx.Node])
    backward: list[fx.Node] = field(default_factory=list[fx.Node])

    @property
    def name(self) -> str:
        return self.softmax.name

    @property
    def ends(self) -> list[fx.Node]:
        row_sum = self.smoothing.row_sum if self.smoothing else None
        ends = [self.of_x, self.of_weight, self.of_bias, row_sum, *self.loss.users]
        return [node for node in ends if node is not None]


def find_heads(graph: fx.Graph) -> tuple[list[Head], list[tuple[fx.Node, str]]]:
    """The heads of a joint graph, and the losses that cannot be chunked, each with the reason."""
    heads: list[Head] = []
    refused: list[tuple[fx.Node, str]] = []
    for softmax in graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        try:
            heads.append(_head_of(softmax))
        except _NoHeadError as error:
            refused.append((softmax, str(error)))
    return heads, refused


def _head_of(softmax: fx.Node) -> Head:
    value: Tensor = softmax.meta["val"]
    if value.dim() != 2 or softmax.args[1] not in (1, -1):
        raise _NoHeadError("its softmax is not over the last of two dimensions: flatten the logits")
    chain = list(_up_to_product(softmax))
    product = chain[-1]
    # `mm` has no bias; `addmm` has it first.
    bias, x, weight = (None, *product.args) if len(product.args) == 2 else product.args[:3]
    if product.kwargs or not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        raise _NoHeadError(f"{product.name} scales its terms")
    if bias is not None and (not isinstance(bias, fx.Node) or bias.meta["val"].dim() != 1):
        raise _NoHeadError(f"{product.name} adds what is no bias")
    losses = [user for user in _reading(softmax) if user.target is aten.nll_loss_forward.default]
    loss = _only(losses, softmax)
    head = Head(softmax, product, x, _transposed(weight), bias, loss)
    _take_rows(head, chain[::-1])
    head.forward = [*chain[::-1], *_names_of(softmax), loss, *loss.users]
    _find_backward(head)
    return head


def _up_to_product(softmax: fx.Node) -> Iterator[fx.Node]:
    node = softmax
    while node.target not in PRODUCTS:
        yield node
        above = node.args[0]
        if not isinstance(above, fx.Node) or above.op != "call_function":
            raise _NoHeadError(f"{node.name} reads what no linear layer has made")
        known = (*PRODUCTS, *SHAPES, *_COPIES, aten.slice.Tensor)
        if above.target not in known:
            raise _NoHeadError(f"its logits go through {above.target} ({above.name})")
        others = [user for user in above.users if user is not node]
        if others:
            raise _NoHeadError(f"its logits are read by {others[0].name} as well")
        node = above
    yield node


def _reading(node: fx.Node) -> list[fx.Node]:
    return [user for name in (node, *_names_of(node)) for user in name.users if not _is_name(user)]


def _names_of(node: fx.Node) -> list[fx.Node]:
    own = [user for user in node.users if _is_name(user)]
    return [name for user in own for name in (user, *_names_of(user))]


def _is_name(node: fx.Node) -> bool:
    return node.target is aten.detach.default


def _only(found: list[fx.Node], of: fx.Node) -> fx.Node:
    if len(found) != 1:
        names = ", ".join(sorted(user.name for user in _reading(of)))
        raise _NoHeadError(f"{of.name} is read by {names}, where one loss is expected")
    return found[0]


def _transposed(weight: fx.Node) -> fx.Node:
    if weight.target is not aten.t.default:
        raise _NoHeadError(f"{weight.name} is no transposed weight")
    source = weight.args[0]
    assert isinstance(source, fx.Node)
    return source


def _take_rows(head: Head, chain: list[fx.Node]) -> None:
    n_classes = head.softmax.meta["val"].shape[1]
    before = head.product.meta["val"]
    for node in chain[1:-1]:
        value: Tensor = node.meta["val"]
        if value.shape[-1] != n_classes:
            raise _NoHeadError(f"{node.name} takes a part of the classes, or joins them with rows")
        if node.target is aten.slice.Tensor:
            _slice(head, node, before)
        before = value


def _slice(head: Head, node: fx.Node, before: Tensor) -> None:
    dim, size = int(node.args[1]) % before.dim(), node.meta["val"].shape  # pyright: ignore
    if len(node.args) > 4 and node.args[4] != 1:
        raise _NoHeadError(f"{node.name} skips rows")
    # The first slice sets the grid; later ones cut it further.
    if not head.grid:
        rows = list(before.shape[:-1])
        head.grid, head.start, head.stop = rows, [0] * len(rows), list(rows)
    elif [b - a for a, b in zip(head.start, head.stop, strict=True)] != list(before.shape[:-1]):
        raise _NoHeadError(f"{node.name} slices rows that were sliced and reshaped")
    first = int(node.args[2] or 0) if len(node.args) > 2 else 0  # pyright: ignore
    first = max(first + before.shape[dim], 0) if first < 0 else first
    head.start[dim] += first
    head.stop[dim] = head.start[dim] + size[dim]


def _find_backward(head: Head) -> None:
    readers = [user for user in _reading(head.softmax) if user is not head.loss]
    losses = [user for user in readers if user.target is aten.nll_loss_backward.default]
    of_loss = _only(losses, head.softmax)
    of_softmax = _only(
        [u for u in readers if u.target is aten._log_softmax_backward_data.default], head.softmax
    )
    smoothing = find_smoothing(readers, of_softmax, of_loss, head.loss.args[2])
    known = (of_loss, of_softmax, *(smoothing.forward if smoothing else ()))
    others = [user for user in readers if user not in known]
    if others:
        raise _NoHeadError(
            f"the logarithms of its probabilities are read by {others[0].name} as well"
        )
    # By what they are: each reader of a constant may have a node of its own for it.
    if list(map(identity_of, head.loss.args[1:5])) != list(map(identity_of, of_loss.args[2:6])):
        raise _NoHeadError(f"{of_loss.name} reads something else than {head.loss.name}")
    reader = smoothing.total if smoothing else of_softmax
    # Ours would leave out any other term of the gradient.
    if of_loss not in reader.args or list(of_loss.users) != [reader]:
        raise _NoHeadError(f"the gradient of {head.softmax.name} has other terms than the loss's")
    head.gradient, head.total_weight = of_loss.args[0], of_loss.args[6]  # pyright: ignore
    if smoothing:
        head.smoothing = smoothing
        head.forward += smoothing.forward
    parts = smoothing.backward if smoothing else ()
    down = [of_loss, *parts, of_softmax, *_down(of_softmax)]
    of_logits = down[-1]
    head.backward = down
    for user in of_logits.users:
        _add_gradient(head, of_logits, user)
    if head.of_x is None and head.of_weight is None:
        raise _NoHeadError("nothing that its linear layer reads is trained")
    if head.of_bias is not None and head.of_weight is None:
        raise _NoHeadError("its bias is trained and its weight is not")


def _down(node: fx.Node) -> Iterator[fx.Node]:
    while len(node.users) == 1 and next(iter(node.users)).target in _BACK:
        node = next(iter(node.users))
        yield node


def _add_gradient(head: Head, of_logits: fx.Node, user: fx.Node) -> None:
    if user.target is aten.mm.default and user.args[0] is of_logits:
        if behind_transposes(user.args[1]) is not head.weight:
            raise _NoHeadError(f"{user.name} multiplies the logits' gradient by something else")
        head.of_x = user
    # As autograd sums a bias of `addmm`.
    elif user.target is aten.sum.dim_IntList and list(user.args[1:]) == [[0], True]:
        head.of_bias = user
    elif user.target is aten.t.default and len(user.users) == 1:
        product = next(iter(user.users))
        if product.target is not aten.mm.default or product.args != (user, head.x):
            raise _NoHeadError(f"{product.name} reads the logits' gradient as well")
        head.of_weight = product
        head.backward.append(user)
    else:
        raise _NoHeadError(f"{user.name} reads the logits' gradient as well")
    head.backward.append(user if user.target is not aten.t.default else next(iter(user.users)))


def loss_results(loss: fx.Node) -> dict[int, fx.Node]:
    """The nodes that pick the loss (0) and the total weight (1)."""
    return {int(user.args[1]): user for user in loss.users if is_getitem(user)}  # pyright: ignore
