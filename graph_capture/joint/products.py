"""The gradient of a product, by the formula that eager chooses from the numbers.

Where no factor is zero, eager divides the product by each. A trace has no numbers, so that torch
takes the products of all others there, which round otherwise and take more memory
(`prod_backward` in torch's `FunctionsManual.cpp`). The nodes are changed here to one op that looks
at the numbers as eager does. It takes as much memory with zeros as without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from remat.graph_capture.joint.nodes import aten, erase_unread

_SLICE = aten.slice.Tensor

_library = torch.library.Library("remat", "FRAGMENT")
_library.define(
    "gradient_of_product(Tensor grad, Tensor input, Tensor result, int dim, bool whole) -> Tensor"
)


@torch.library.impl(_library, "gradient_of_product", "CompositeExplicitAutograd")
def gradient_of_product(
    grad: Tensor, input: Tensor, result: Tensor, dim: int, whole: bool
) -> Tensor:
    """The gradient of the product of all of `input`, flat, or of that over `dim`."""
    zeros = input.numel() - int(torch.count_nonzero(input))
    # With two zeros, the product of all others is zero for each factor.
    if whole and zeros > 1:
        return input.new_zeros(input.numel())
    if zeros:
        others = _products_of_all_others(input, dim, whole)
    else:
        others = (result if result.dim() == input.dim() or whole else result.unsqueeze(dim)) / input
    # Laid out as the node in the trace, which `make_products_exact` takes only if contiguous.
    gradient = torch.empty_like(others, memory_format=torch.contiguous_format)
    torch.mul(grad, others.conj(), out=gradient)
    return gradient.view(-1) if whole else gradient


@torch.library.impl(_library, "gradient_of_product", "Meta")
def _like_factors(grad: Tensor, input: Tensor, result: Tensor, dim: int, whole: bool) -> Tensor:
    return input.new_empty([input.numel()] if whole else input.shape)


def _products_of_all_others(factors: Tensor, dim: int, whole: bool) -> Tensor:
    # In place where it can be, so that never more than two tensors as large as `factors` exist.
    after = _shifted(factors, dim, whole, reverse=True).cumprod_(dim).flip(dim)
    return _shifted(factors, dim, whole, reverse=False).cumprod_(dim).mul_(after)


def _shifted(factors: Tensor, dim: int, whole: bool, *, reverse: bool) -> Tensor:
    """One, then all factors but the last; with `reverse`, all but the first, from the end."""
    n = factors.numel() if whole else factors.shape[dim]
    # Copied straight behind the one: `reshape` of what is not packed would be one tensor more.
    if whole and not reverse:
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
    # What torch's `prod_safe_zeros_backward` traces to, from the end backwards.
    grad, others = node.args
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
    # With prod(dtype=), forward and backward may each have cast the factors.
    cast = _if_calls(factors, aten._to_copy.default)
    for result in (*factors.users, *(cast.args[0].users if cast else ())):
        if result.meta["val"].dtype == factors.meta["val"].dtype and (
            (whole and result.target is aten.prod.default)
            or (not whole and _is_over(result, dim, factors.meta["val"].dim()))
        ):
            return grad, factors, result, dim, whole
    return None


def _is_over(product: Any, dim: int, n_dims: int) -> bool:
    return product.target is aten.prod.dim_int and product.args[1] % n_dims == dim


def _if_calls(node: Any, target: Any) -> Any:
    return node if isinstance(node, fx.Node) and node.target is target else None
