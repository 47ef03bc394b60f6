"""A linear head with its cross-entropy in pieces, so that all logits are never live at once.

Outputs are cut, sums never, so that each number is made by eager's kernel over eager's sum. Blocks
of rows serve the loss and the gradient of the head's input. The gradient of its weight sums over
rows, so it is cut by classes. A block of classes needs two numbers of each row that the whole row
decides: its maximum and the logarithm of its sum. Forward returns them.

`INPUT_AND_WEIGHT` sums the weight's gradient over blocks of rows instead. It makes the logits once
where the exact pair makes them twice, and its sum has another order.

Chunked losses: Liger Kernel (P.-L. Hsu et al., 2024, https://arxiv.org/abs/2410.10989), Cut Your
Losses (E. Wijmans et al., 2024, https://arxiv.org/abs/2411.09009). Both sum in another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from remat.graph_capture.splitting.head_loss import HeadLoss, Rows, blocks

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""Reductions, as torch numbers them."""
CLASSES_MULTIPLE = 64
"""Blocks of classes are multiples of it, so that each begins at a line of the caches."""

_HEAD = "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight"
_FACTS = "int[] grid, int[] start, int[] stop, ScalarType dtype, int reduction, int ignore_index"
_SAVED = "Tensor total_weight, Tensor top, Tensor log_sum"
_library = torch.library.Library("remat", "FRAGMENT")
_library.define(
    f"linear_cross_entropy({_HEAD}, {_FACTS}, int pieces)"
    " -> (Tensor loss, Tensor total_weight, Tensor top, Tensor log_sum)"
)
_library.define(
    f"linear_cross_entropy_input(Tensor gradient, {_HEAD}, {_SAVED}, {_FACTS}, int pieces)"
    " -> Tensor"
)
_library.define(
    f"linear_cross_entropy_weight(Tensor gradient, {_HEAD}, {_SAVED}, {_FACTS}, int pieces)"
    " -> (Tensor weight_gradient, Tensor bias_gradient)"
)
_library.define(
    f"linear_cross_entropy_both(Tensor gradient, {_HEAD}, {_SAVED}, {_FACTS}, int pieces)"
    " -> (Tensor input_gradient, Tensor weight_gradient, Tensor bias_gradient)"
)


def _opened(given: tuple[Any, ...]) -> tuple[HeadLoss, Tensor, Tensor, Tensor]:
    """What an op of backward is given beside the gradient: the loss, and what forward saved."""
    return HeadLoss(*given[:5], *given[8:]), *given[5:8]


@torch.library.impl(_library, "linear_cross_entropy", "CompositeExplicitAutograd")
def linear_cross_entropy(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(loss, total weight, maximum, logarithm of the sum)``, the last two a number a row."""
    one = HeadLoss(*given)
    target = one.target
    picked = torch.empty(len(target), 1, dtype=one.dtype, device=one.x.device)
    top, log_sum = torch.empty_like(picked), torch.empty_like(picked)
    is_counted = target != one.ignore_index
    safe = torch.where(is_counted, target, 0).unsqueeze(1)
    for rows in one.row_blocks():
        logits = one.logits(rows)
        top[rows.of_loss] = logits.amax(1, keepdim=True)
        log_p = aten._log_softmax(logits, 1, False)
        del logits
        picked[rows.of_loss] = log_p.gather(1, safe[rows.of_loss])
        # At the maximum, the logarithm of p is 0 less that of the sum, exactly.
        log_sum[rows.of_loss] = log_p.amax(1, keepdim=True).neg_()
        del log_p
    return *_reduced(one, picked, is_counted), top, log_sum


def _reduced(one: HeadLoss, picked: Tensor, is_counted: Tensor) -> tuple[Tensor, Tensor]:
    """``(loss, total weight)`` of rows with these logarithms: by eager's kernel, of one class."""
    target = torch.where(is_counted, 0, one.ignore_index)
    if one.class_weight is None:
        return aten.nll_loss_forward(picked, target, None, one.reduction, one.ignore_index)
    of_row = one.class_weight[torch.where(is_counted, one.target, 0)].unsqueeze(1)

    def summed(of_rows: Tensor, reduction: int = SUM) -> Tensor:
        return aten.nll_loss_forward(of_rows, target, None, reduction, one.ignore_index)[0]

    weighted = picked * of_row
    if one.reduction == NONE:
        return summed(weighted, NONE), picked.new_zeros(())
    loss, total = summed(weighted), summed(of_row.neg())
    return (loss / total if one.reduction == MEAN else loss), total


def _rows_gradient(one: HeadLoss, gradient: Tensor, total: Tensor, rows: Rows) -> Tensor:
    """The gradient of a block of rows of the logits, in x's dtype."""
    log_p = aten._log_softmax(one.logits(rows), 1, False)
    of_log_p = _nll_backward(one, gradient, log_p, rows.of_loss, total)
    made = aten._log_softmax_backward_data(of_log_p, log_p, 1, one.dtype)
    del log_p, of_log_p
    return one.whole_rows(made, rows.a, rows.b, rows.inside)


def _nll_backward(
    one: HeadLoss, gradient: Tensor, log_p: Tensor, rows: slice, total: Tensor
) -> Tensor:
    handed = gradient[rows] if gradient.dim() else gradient
    return aten.nll_loss_backward(
        handed, log_p, one.target[rows], one.class_weight, one.reduction, one.ignore_index, total
    )


@torch.library.impl(_library, "linear_cross_entropy_input", "CompositeExplicitAutograd")
def linear_cross_entropy_input(gradient: Tensor, *given: Any) -> Tensor:
    """The gradient of x, by blocks of rows."""
    one, total, _, _ = _opened(given)
    made = torch.empty_like(one.x)
    for rows in one.row_blocks():
        of_logits = _rows_gradient(one, gradient, total, rows)
        torch.mm(of_logits, one.weight, out=made[rows.a : rows.b])
        del of_logits
    return made


@torch.library.impl(_library, "linear_cross_entropy_weight", "CompositeExplicitAutograd")
def linear_cross_entropy_weight(gradient: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias, by blocks of classes; the second is empty without bias."""
    one, total, top, log_sum = _opened(given)
    of_weight = torch.empty_like(one.weight)
    of_bias = one.weight.new_empty((0,) if one.bias is None else (1, one.n_classes))
    row_sums = _row_sums(one, gradient, top, total)
    every = torch.arange(len(one.target), device=one.x.device)
    for a, b in blocks(one.n_classes, one.pieces, CLASSES_MULTIPLE):
        made = _class_gradients(one, a, b, (top, log_sum, row_sums), every)
        made = one.whole_rows(made, 0, one.x.shape[0], one.chosen_here).contiguous()
        torch.mm(made.t(), one.x, out=of_weight[a:b])
        if one.bias is not None:
            of_bias[:, a:b] = made.sum([0], True)
        del made
    return of_weight, of_bias


def _row_sums(one: HeadLoss, gradient: Tensor, like: Tensor, total: Tensor) -> Tensor:
    """The sum of each row of the loss's gradient: that of the target, as no other class has one."""
    sums = torch.empty_like(like)
    at = torch.where(one.target != one.ignore_index, one.target, 0).unsqueeze(1)
    for a, b in blocks(len(one.target), one.pieces):
        rows = slice(a, b)
        # Only the shape of the logarithms is read.
        log_p = like[rows].expand(-1, one.n_classes)
        sums[rows] = _nll_backward(one, gradient, log_p, rows, total).gather(1, at[rows])
    return sums


def _class_gradients(
    one: HeadLoss, a: int, b: int, of_rows: tuple[Tensor, Tensor, Tensor], every: Tensor
) -> Tensor:
    """The gradient of the logits of classes a..b - 1, for all rows that the loss takes."""
    top, log_sum, row_sums = of_rows
    n_block = b - a
    # One column more holds what a row's sum has outside of this block.
    log_p = torch.zeros(len(top), n_block + 1, dtype=one.dtype, device=top.device)
    log_p[:, :n_block] = one.class_logits(a, b)
    log_p[:, :n_block].sub_(top).sub_(log_sum)
    at = torch.where((one.target >= a) & (one.target < b), one.target - a, n_block)
    of_log_p = torch.zeros_like(log_p)
    of_log_p[every, at] = row_sums[:, 0]
    return aten._log_softmax_backward_data(of_log_p, log_p, 1, one.dtype)[:, :n_block]


@torch.library.impl(_library, "linear_cross_entropy_both", "CompositeExplicitAutograd")
def linear_cross_entropy_both(gradient: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias by blocks of rows; the last two summed over blocks."""
    one, total, _, _ = _opened(given)
    of_x, of_weight = torch.empty_like(one.x), torch.zeros_like(one.weight)
    of_bias = one.weight.new_zeros((0,) if one.bias is None else (1, one.n_classes))
    for rows in one.row_blocks():
        of_logits = _rows_gradient(one, gradient, total, rows)
        torch.mm(of_logits, one.weight, out=of_x[rows.a : rows.b])
        of_weight.addmm_(of_logits.t(), one.x[rows.a : rows.b])
        if one.bias is not None:
            of_bias += of_logits.sum([0], True)
        del of_logits
    return of_x, of_weight, of_bias


FORWARD = torch.ops.remat.linear_cross_entropy.default
INPUT = torch.ops.remat.linear_cross_entropy_input.default
WEIGHT = torch.ops.remat.linear_cross_entropy_weight.default
INPUT_AND_WEIGHT = torch.ops.remat.linear_cross_entropy_both.default
