"""Linear layers in a joint graph, and heads, or why one is none.

A head: a product with the transposed weight, then nodes that change the shape, take rows or
convert, then `_log_softmax` and `nll_loss_forward`; and their backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, fx

from remat.graph_capture.joint.nodes import aten, is_getitem

SHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
PRODUCTS = (aten.mm.default, aten.addmm.default)
_DETACH = (aten.detach.default,)
_NAMES = (*SHAPES, *_DETACH)


class NoMlpError(Exception):
    """What looks like an MLP is none that can run in chunks."""


class Linear(NamedTuple):
    product: fx.Node
    x: fx.Node
    weight: fx.Node  # (out, in)
    bias: fx.Node | None


def linear_above(node: Any) -> Linear:
    """The layer whose result `node` is, in another shape at most."""
    if (found := linear_of(sources_of(node)[-1])) is None:
        raise NoMlpError
    return found


def linear_of(product: fx.Node) -> Linear | None:
    if product.target not in PRODUCTS or product.kwargs:
        return None
    bias, x, weight = _factors(product)
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    if weight.target is not aten.t.default or len(product.args) > 3 or not _may_be_bias(bias):
        return None
    source = weight.args[0]
    assert isinstance(source, fx.Node)
    return Linear(product, x, source, bias)


def _factors(product: fx.Node) -> tuple[Any, Any, Any]:
    """Bias, input and transposed weight: `mm` has no bias; `addmm` has it first."""
    args: Any = product.args
    return (None, *args) if len(args) == 2 else args[:3]


def _may_be_bias(bias: Any) -> bool:
    return bias is None or (isinstance(bias, fx.Node) and bias.meta["val"].dim() == 1)


def linear_below(node: fx.Node) -> Linear | None:
    """The one layer that is given `node`, in another shape at most."""
    pairs = [(one, linear_of(user)) for one in aliases_of(node) for user in one.users]
    found = [layer for one, layer in pairs if layer is not None and layer.x is one]
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


def aliases_of(node: fx.Node, by: tuple[Any, ...] = _NAMES) -> list[fx.Node]:
    own = [user for user in node.users if user.target in by]
    return [node, *(alias for user in own for alias in aliases_of(user, by))]


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


# Label smoothing adds the sum of each row's logarithms to the loss: a chunk makes that sum too. All
# else that it does has one number a row, and stays as captured.


@dataclass(frozen=True)
class _Smoothing:
    """The nodes of label smoothing that have a number for each row and class."""

    row_sum: fx.Node  # sums of all rows, (m,)
    row_term: fx.Node  # the gradient of these, (m, 1)
    total: fx.Node  # adds its part to that of the loss
    forward: tuple[fx.Node, ...]  # only serve these, each before those that read it
    backward: tuple[fx.Node, ...]


def _find_smoothing(
    readers: Sequence[fx.Node], of_softmax: fx.Node, of_loss: fx.Node, class_weight: Any
) -> _Smoothing | None:
    """The label smoothing among `readers` of the log-probabilities; None if none is known."""
    total = of_softmax.args[0]
    if not isinstance(total, fx.Node) or total.target is not aten.add.Tensor or total.kwargs:
        return None
    if total.args.count(of_loss) != 1:
        return None
    scaled = _unscaled(next(one for one in total.args if one is not of_loss), class_weight)
    found = [one for r in readers if (one := _summed(r, class_weight)) is not None]
    if scaled is None or len(found) != 1 or list(total.users) != [of_softmax]:
        return None
    expanded, *back = scaled
    row_term = expanded.args[0]
    if expanded.target is not aten.expand.default or not isinstance(row_term, fx.Node):
        return None
    n_rows = of_softmax.meta["val"].shape[0]
    if list(row_term.meta["val"].shape) != [n_rows, 1] or len(expanded.users) != 1:
        return None
    return _Smoothing(found[0][-1], row_term, total, found[0], (expanded, *back, total))


def identity_of(argument: Any) -> Any:
    if not isinstance(argument, fx.Node):  # several nodes may read one constant
        return argument
    return str(argument.target) if argument.op == "get_attr" else argument.name


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


_COPIES = (aten.clone.default, aten._to_copy.default)
_BACK = (*SHAPES, *_COPIES, aten.slice_backward.default)


class _NoHeadError(Exception):
    """Why what looks like a head cannot be chunked: the sentence goes on after its name."""


@dataclass
class Head:
    softmax: fx.Node
    product: fx.Node  # of all logits
    x: fx.Node
    weight: fx.Node  # (classes, d)
    bias: fx.Node | None
    loss: fx.Node  # its `nll_loss_forward`
    grid: list[int] = field(default_factory=list[int])  # rows that the loss takes; empty for all
    start: list[int] = field(default_factory=list[int])
    stop: list[int] = field(default_factory=list[int])
    gradient: fx.Node | None = None  # what backward hands to the loss
    total_weight: fx.Node | None = None
    smoothing: _Smoothing | None = None
    of_x: fx.Node | None = None  # nodes that make the gradients, None where nobody needs one
    of_weight: fx.Node | None = None
    of_bias: fx.Node | None = None
    forward: list[fx.Node] = field(default_factory=list[fx.Node])  # in graph order; they only serve
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
    heads, refused = list[Head](), list[tuple[fx.Node, str]]()
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
    bias, x, weight = _factors(product)
    if product.kwargs or not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        raise _NoHeadError(f"{product.name} scales its result")
    if not _may_be_bias(bias):
        raise _NoHeadError(f"{product.name} adds something that is no bias")
    readers = _reading(softmax)
    loss = _only([u for u in readers if u.target is aten.nll_loss_forward.default], softmax)
    if weight.target is not aten.t.default:
        raise _NoHeadError(f"{weight.name} is not a transposed weight")
    source = weight.args[0]
    assert isinstance(source, fx.Node)
    head = Head(softmax, product, x, source, bias, loss)
    _take_rows(head, chain[::-1])
    head.forward = [*chain[:0:-1], *aliases_of(softmax, _DETACH), loss, *loss.users]
    _find_backward(head)
    return head


def _up_to_product(softmax: fx.Node) -> Iterator[fx.Node]:
    node = softmax
    while node.target not in PRODUCTS:
        yield node
        above = node.args[0]
        if not isinstance(above, fx.Node) or above.op != "call_function":
            raise _NoHeadError(f"{node.name} reads something that no linear layer made")
        if above.target not in (*PRODUCTS, *SHAPES, *_COPIES, aten.slice.Tensor):
            raise _NoHeadError(f"its logits pass through {above.target} ({above.name})")
        if others := [user for user in above.users if user is not node]:
            raise _NoHeadError(f"its logits are also read by {others[0].name}")
        node = above
    yield node


def _reading(node: fx.Node) -> list[fx.Node]:
    users = (user for name in aliases_of(node, _DETACH) for user in name.users)
    return [user for user in users if user.target not in _DETACH]


def _only(found: list[fx.Node], of: fx.Node) -> fx.Node:
    if len(found) != 1:
        names = ", ".join(sorted(user.name for user in _reading(of)))
        raise _NoHeadError(f"{of.name} is read by {names}, but a head has one loss")
    return found[0]


def _take_rows(head: Head, chain: list[fx.Node]) -> None:
    n_classes = head.softmax.meta["val"].shape[1]
    before = head.product.meta["val"]
    for node in chain[1:-1]:
        value: Tensor = node.meta["val"]
        if value.shape[-1] != n_classes:
            raise _NoHeadError(f"{node.name} takes only some classes, or mixes them with rows")
        if node.target is aten.slice.Tensor:
            _slice(head, node, before)
        before = value


def _slice(head: Head, node: fx.Node, before: Tensor) -> None:
    dim, size = int(node.args[1]) % before.dim(), node.meta["val"].shape  # pyright: ignore
    if len(node.args) > 4 and node.args[4] != 1:
        raise _NoHeadError(f"{node.name} skips rows")
    if not head.grid:  # the first slice sets the grid; later ones cut it further
        rows = list(before.shape[:-1])
        head.grid, head.start, head.stop = rows, [0] * len(rows), list(rows)
    elif [b - a for a, b in zip(head.start, head.stop, strict=True)] != list(before.shape[:-1]):
        raise _NoHeadError(f"{node.name} slices rows that were already sliced and reshaped")
    first = int(node.args[2] or 0) if len(node.args) > 2 else 0  # pyright: ignore
    first = max(first + before.shape[dim], 0) if first < 0 else first
    head.start[dim] += first
    head.stop[dim] = head.start[dim] + size[dim]


def _find_backward(head: Head) -> None:
    readers = [user for user in _reading(head.softmax) if user is not head.loss]
    of_loss, of_softmax = (
        _only([user for user in readers if user.target is target], head.softmax)
        for target in (aten.nll_loss_backward.default, aten._log_softmax_backward_data.default)
    )
    smoothing = _find_smoothing(readers, of_softmax, of_loss, head.loss.args[2])
    known = (of_loss, of_softmax, *(smoothing.forward if smoothing else ()))
    if others := [user for user in readers if user not in known]:
        who = others[0].name
        raise _NoHeadError(f"its log-probabilities are also read by {who}")
    # By what they are: each reader of a constant may have a node of its own for it.
    if list(map(identity_of, head.loss.args[1:5])) != list(map(identity_of, of_loss.args[2:6])):
        raise _NoHeadError(f"{of_loss.name} reads something other than {head.loss.name}")
    reader = smoothing.total if smoothing else of_softmax
    if of_loss not in reader.args or list(of_loss.users) != [reader]:  # ours would leave out others
        raise _NoHeadError(f"the gradient of {head.softmax.name} has terms that are not the loss's")
    head.gradient, head.total_weight = of_loss.args[0], of_loss.args[6]  # pyright: ignore
    if smoothing:
        head.smoothing = smoothing
        head.forward += smoothing.forward
    parts = smoothing.backward if smoothing else ()
    head.backward = [of_loss, *parts, of_softmax, *_down(of_softmax)]
    of_logits = head.backward[-1]
    for user in of_logits.users:
        _add_gradient(head, of_logits, user)
    if head.of_x is None and head.of_weight is None:
        raise _NoHeadError("nothing that its linear layer reads requires grad")
    if head.of_bias is not None and head.of_weight is None:
        raise _NoHeadError("its bias requires grad and its weight does not")


def _down(node: fx.Node) -> Iterator[fx.Node]:
    while len(node.users) == 1 and next(iter(node.users)).target in _BACK:
        node = next(iter(node.users))
        yield node


def _add_gradient(head: Head, of_logits: fx.Node, user: fx.Node) -> None:
    if user.target is aten.mm.default and user.args[0] is of_logits:
        if behind_transposes(user.args[1]) is not head.weight:
            raise _NoHeadError(
                f"{user.name} multiplies the gradient of the logits by something else"
            )
        head.of_x = user
    # As autograd sums a bias of `addmm`.
    elif user.target is aten.sum.dim_IntList and list(user.args[1:]) == [[0], True]:
        head.of_bias = user
    elif user.target is aten.t.default and len(user.users) == 1:
        (product,) = user.users
        if product.target is not aten.mm.default or product.args != (user, head.x):
            raise _NoHeadError(f"{product.name} also reads the gradient of the logits")
        head.backward.append(user)
        head.of_weight = user = product
    else:
        raise _NoHeadError(f"{user.name} also reads the gradient of the logits")
    head.backward.append(user)


def loss_results(loss: fx.Node) -> dict[int, fx.Node]:
    """The nodes that pick the loss (0) and the total weight (1)."""
    return {int(user.args[1]): user for user in loss.users if is_getitem(user)}  # pyright: ignore
