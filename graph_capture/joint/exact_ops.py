"""Dropout as eager computes it on a CPU, to the last bit and in about its time.

A trace's `aten.native_dropout` scales by 1 / (1 - p) rounded from double precision. Eager divides
in the tensor's own, which may round otherwise. The mask stays one byte an element, where eager
keeps a float: the plan that keeps everything needs less than the unmodified step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.joint.nodes import aten, erase_unread
from remat.graph_capture.torch_private.core import (
    cudnn_batch_norm_reserve_bytes,
    make_contiguous_strides_for,
    suggest_memory_format,
    takes_cudnn_batch_norm,
)

_library = torch.library.Library("remat", "DEF")
_library.define(
    "dropout(Tensor x, float p, float scale, *, Generator? generator=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_library.define("dropout_backward(Tensor gradient, Tensor mask, float scale) -> Tensor")


@torch.library.impl(_library, "dropout", "CompositeExplicitAutograd")
def _dropout_as_eager(
    x: Tensor, p: float, scale: float, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """``(result, mask)``"""
    # The same draws as eager's, which fills floats of x's dtype.
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return _dropped(x, mask, scale), mask


@torch.library.impl(_library, "dropout_backward", "CompositeExplicitAutograd")
def _dropped(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """`x` times eager's noise, in the storage of the noise if that is laid out as the product."""
    # uint8: CPU kernels convert bool slower; torch's backward took 0.56 ms, this 0.22, eager 0.17.
    noise = mask.view(torch.uint8).to(x.dtype).mul_(scale)
    is_as_product = noise.stride() == x.stride() and (  # not along dimensions of one element
        1 not in x.shape or x.stride() == make_contiguous_strides_for(x.shape)
    )
    return noise.mul_(x) if is_as_product else x.mul(noise)


DROPOUT = torch.ops.remat.dropout.default
DROPOUT_BACKWARD = torch.ops.remat.dropout_backward.default


def scale_of_eager(p: float, dtype: torch.dtype) -> float:
    return torch.ones(1, dtype=dtype).div_(1 - p).item()  # a trace rounds 1 / (1 - p) from a double


def make_dropout_exact(gm: fx.GraphModule) -> None:
    for node in gm.graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p = node.args[0], node.args[1]
        value: Any = x.meta["val"] if isinstance(x, fx.Node) else None
        is_on_cpu = isinstance(value, Tensor) and value.device.type == "cpu"
        if is_on_cpu and isinstance(p, float) and 0 < p < 1:  # p = 1 has no scale, p = 0 needs none
            scale = scale_of_eager(p, value.dtype)
            node.target, node.args = DROPOUT, (x, p, scale)
            for user in _reading_result(node, 1):
                if user.target is aten.native_dropout_backward.default:
                    args: tuple[Any, ...] = (*user.args[:2], scale)
                    user.target, user.args = DROPOUT_BACKWARD, args


def _reading_result(node: fx.Node, place: int) -> Iterator[fx.Node]:
    """What reads the result at that place, or a detached name of it."""
    left = [user for user in node.users if user.args[1] == place]
    while left:
        for user in list(left.pop().users):
            if user.target is aten.detach.default:
                left.append(user)
            else:
                yield user


# The weights of classes under label smoothing, summed in eager's order.

_SAME_NUMBERS = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default,
)  # fmt: skip

_library.define("sum_of_class_weights(Tensor weight, Tensor target, int ignore_index) -> Tensor")


@torch.library.impl(_library, "sum_of_class_weights", "CompositeExplicitAutograd")
def sum_of_class_weights(weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    # As `cross_entropy_loss_label_smoothing` in torch's `LossNLL.cpp`. In a trace, which does not
    # know how many targets count, torch sums zeros for the others, which rounds otherwise.
    return weight.gather(0, target.masked_select(target != ignore_index)).sum()


@torch.library.impl(_library, "sum_of_class_weights", "Meta")
def _of_no_dimension(weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    return weight.new_empty(())


def make_class_weights_exact(gm: fx.GraphModule) -> None:
    for node in gm.graph.find_nodes(op="call_function", target=aten.sum.default):
        if (facts := _summed_weights(node)) is not None:
            read = node.all_input_nodes
            node.target, node.args = torch.ops.remat.sum_of_class_weights.default, facts
            erase_unread(*read)


def _summed_weights(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """Weights, targets and the ignored one, where a node sums the weights of all targets."""
    counted = _called(node.args[0], aten.masked_fill.Scalar)
    picked = _called(counted.args[0], aten.gather.default) if counted else None
    safe = _called(picked.args[2], aten.masked_fill.Scalar) if picked else None
    if counted is None or picked is None or safe is None or len(node.args) > 1 or node.kwargs:
        return None
    is_ignored = _called(safe.args[1], aten.eq.Scalar)
    facts: Any = picked.args[0], safe.args[0], is_ignored.args[1] if is_ignored else None
    is_same = is_ignored is not None and is_ignored.args[0] is safe.args[0]
    is_same = is_same and _called(counted.args[1], aten.eq.Scalar) is is_ignored
    is_filled = counted.args[2] == safe.args[2] == picked.args[1] == 0
    return facts if is_same and is_filled else None


def _called(node: Any, target: Any) -> fx.Node | None:
    """The node, behind changes of its shape, if it calls `target`."""
    while isinstance(node, fx.Node) and node.target in _SAME_NUMBERS:
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.target is target else None


# Batch norm in training. A trace has `aten.native_batch_norm` where eager may take cuDNN's kernels,
# whose last bits differ. Such nodes become, with their backward, an op that chooses when it runs.

_library.define(
    "batch_norm(Tensor x, Tensor weight, Tensor bias, float momentum, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(_library, "batch_norm", "CompositeExplicitAutograd")
def batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    """``(result, mean, inverse deviation, reserve)`` by the kernels of `_CHOSEN`."""
    # The op must have statistics to update: these are thrown away.
    mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    return aten._batch_norm_with_update(x, weight, bias, mean, variance, momentum, eps)


_WITHOUT_STATISTICS = torch.ops.remat.batch_norm.default
_TRACED = aten._native_batch_norm_legit_functional.default
_TRACED_WITHOUT_STATISTICS = aten._native_batch_norm_legit.no_stats
_TRACED_BACKWARD = aten.native_batch_norm_backward.default
_CHOSEN = aten._batch_norm_with_update_functional.default
CHOSEN_BACKWARD = aten.batch_norm_backward.default
MEAN, _RESERVE = 1, 3  # places among the results

# By op that returns new running statistics: the op of the rest, and how many results it has.
RECOMPUTED_BY: dict[Any, tuple[Any, int]] = {
    _TRACED: (_TRACED_WITHOUT_STATISTICS, 3),
    _CHOSEN: (_WITHOUT_STATISTICS, 4),
}


def makes_statistics(node: fx.Node) -> bool:
    """Whether the node also returns new running statistics, which may be made only once."""
    return node.target is _CHOSEN or (node.target is _TRACED and bool(node.args[5]))


def run_by_kernels_of_eager(gm: fx.GraphModule) -> None:
    for node in gm.graph.find_nodes(op="call_function", target=_TRACED):
        x, weight, bias, mean, variance, training, momentum, eps = node.args
        if training and is_by_cudnn((x, weight, bias, mean, variance), eps):
            _change(node, _CHOSEN, (x, weight, bias, mean, variance, momentum, eps))
    for node in gm.graph.find_nodes(op="call_function", target=_TRACED_WITHOUT_STATISTICS):
        x, weight, bias, training, momentum, eps = node.args
        if training and is_by_cudnn((x, weight, bias, None, None), eps):
            _change(node, _WITHOUT_STATISTICS, (x, weight, bias, momentum, eps))


def is_by_cudnn(read: tuple[Any, ...], eps: Any) -> bool:
    """`read` : nodes of the input, weight, bias, running mean and running variance, or None."""
    x, weight, bias, mean, variance = (
        arg.meta["val"] if isinstance(arg, fx.Node) else None for arg in read
    )
    if x is None or not x.is_cuda or weight is None or bias is None:
        return False
    if not x.is_contiguous(memory_format=suggest_memory_format(x)):
        return False
    # Without statistics the op gets some like the weight (`batch_norm`), so they decide too.
    statistics = (weight if mean is None else mean, weight if variance is None else variance)
    return takes_cudnn_batch_norm(x, weight, bias, *statistics, eps=eps)


def reserved(x: Tensor) -> Tensor:
    return x.new_empty(cudnn_batch_norm_reserve_bytes(x) if x.is_cuda else 0, dtype=torch.uint8)


def _change(node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    """Give `node` the op `target`, which returns the reserve before the new statistics."""
    node.target, node.args = target, args
    for picked in list(node.users):
        index = picked.args[1]
        assert isinstance(index, int)
        picked.args = (node, index + (index >= _RESERVE))
    before, reserve = node.meta["val"], reserved(args[0].meta["val"])
    node.meta["val"] = (*before[:_RESERVE], reserve, *before[_RESERVE:])
    with node.graph.inserting_after(node):
        kept = node.graph.call_function(operator.getitem, (node, _RESERVE))
    kept.meta = {**node.meta, "val": reserve}
    for backward in list(_reading_result(node, MEAN)):
        if backward.target is _TRACED_BACKWARD:
            *read, _, eps, mask = backward.args  # `update` instead of `train`, reserve last
            backward.target = CHOSEN_BACKWARD
            backward.args = (*read, True, eps, mask, kept)


# A product's gradient. Eager divides it by each factor if none is zero. A trace has no numbers, so
# torch takes the products of all others there, with other rounding and more memory (`prod_backward`
# in torch's `FunctionsManual.cpp`). One op looks at the numbers instead, as eager does.

_SLICE = aten.slice.Tensor

_library.define(
    "gradient_of_product(Tensor grad, Tensor input, Tensor result, int dim, bool whole) -> Tensor"
)


@torch.library.impl(_library, "gradient_of_product", "CompositeExplicitAutograd")
def gradient_of_product(
    grad: Tensor, input: Tensor, result: Tensor, dim: int, whole: bool
) -> Tensor:
    """The gradient of the product of all of `input`, flat, or of that over `dim`."""
    zeros = input.numel() - int(torch.count_nonzero(input))
    if whole and zeros > 1:  # with two zeros, the product of all others is zero for each factor
        return input.new_zeros(input.numel())
    if zeros:
        # In place where it can be, so that never more than two tensors as large as `factors` exist.
        after = _shifted(input, dim, whole, reverse=True).cumprod_(dim).flip(dim)
        others = _shifted(input, dim, whole, reverse=False).cumprod_(dim).mul_(after)
        del after
    else:
        others = (result if result.dim() == input.dim() or whole else result.unsqueeze(dim)) / input
    # Laid out as the node in the trace, which `make_products_exact` takes only if contiguous.
    gradient = torch.empty_like(others, memory_format=torch.contiguous_format)
    torch.mul(grad, others.conj(), out=gradient)
    return gradient.view(-1) if whole else gradient


@torch.library.impl(_library, "gradient_of_product", "Meta")
def _like_factors(grad: Tensor, input: Tensor, result: Tensor, dim: int, whole: bool) -> Tensor:
    return input.new_empty([input.numel()] if whole else input.shape)


def _shifted(factors: Tensor, dim: int, whole: bool, *, reverse: bool) -> Tensor:
    """One, then all factors but the last; with `reverse`, all but the first, from the end."""
    n = factors.numel() if whole else factors.shape[dim]
    if whole and not reverse:  # copied at once: else `reshape` makes one tensor more
        one_more = factors.new_empty(n + 1)
        one_more[1:].view(factors.shape).copy_(factors)
        one_more[0] = 1
        return one_more[:n]
    ordered = (factors.reshape(-1) if whole else factors).flip(dim) if reverse else factors
    shifted = torch.empty_like(ordered, memory_format=torch.contiguous_format)
    shifted.narrow(dim, 0, 1).fill_(1)
    shifted.narrow(dim, 1, n - 1).copy_(ordered.narrow(dim, 0, n - 1))
    return shifted


def make_products_exact(gm: fx.GraphModule) -> None:
    for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        facts = _gradient_of_product(node)
        if facts is not None and node.meta["val"].is_contiguous():
            read = node.all_input_nodes
            node.target, node.args = torch.ops.remat.gradient_of_product.default, facts
            erase_unread(*read)


def _gradient_of_product(node: fx.Node) -> tuple[Any, ...] | None:
    grad, others = node.args  # torch's `prod_safe_zeros_backward` as traced, from the end
    resolved = _if_calls(others, aten.clone.default)
    conjugate = _if_calls(resolved.args[0] if resolved else others, aten._conj.default)
    product = _if_calls(conjugate.args[0] if conjugate else others, aten.mul.Tensor)
    flipped = _if_calls(product.args[1], aten.flip.default) if product else None
    if product is None or flipped is None:
        return None
    before, dim = _behind_ones(product.args[0])
    reverse, _ = _behind_ones(flipped.args[0])
    last = _if_calls(reverse, aten.flip.default)
    first, after = _if_calls(before, _SLICE), last and _if_calls(last.args[0], _SLICE)
    if not first or not after or after.args[:3] != (first.args[0], dim, 1):
        return None
    return _as_eager(grad, first.args[0], dim) if first.args[1:3] == (dim, 0) else None


def _behind_ones(node: Any) -> tuple[Any, Any]:
    """Factors behind ones in a `cumprod`, and its dimension; None where it is none."""
    products = _if_calls(node, aten.cumprod.default)
    joined = _if_calls(products.args[0], aten.cat.default) if products else None
    pieces: Any = joined.args[0] if joined else ()
    if products is None or len(pieces) != 2 or not _if_calls(pieces[0], aten.ones.default):
        return None, None
    return pieces[1], products.args[1]


def _as_eager(grad: Any, factors: Any, dim: Any) -> tuple[Any, ...] | None:
    flat = _if_calls(factors, aten.view.default)
    whole = flat is not None and flat.args[1] == [-1]
    if flat is not None and whole:
        packed = _if_calls(flat.args[0], aten.clone.default)
        factors = packed.args[0] if packed else flat.args[0]
    cast = _if_calls(factors, aten._to_copy.default)  # prod(dtype=) may have cast the factors
    value = factors.meta["val"]
    for result in (*factors.users, *(cast.args[0].users if cast else ())):
        if whole:
            is_product = result.target is aten.prod.default
        else:
            is_product = result.target is aten.prod.dim_int and result.args[1] % value.dim() == dim
        if is_product and result.meta["val"].dtype == value.dtype:
            return grad, factors, result, dim, whole
    return None


def _if_calls(node: Any, target: Any) -> Any:
    return node if isinstance(node, fx.Node) and node.target is target else None
