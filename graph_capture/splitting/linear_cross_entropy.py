"""A linear head with its cross-entropy in pieces, so that all logits are never live at once.

Outputs are cut, sums never, so that each number is made by eager's kernel over eager's sum. Blocks
of rows serve the loss and the gradient of the head's input. The gradient of its weight sums over
rows, so it is cut by classes. A block of classes needs two numbers of each row that the whole row
decides: its maximum and the logarithm of its sum. Forward returns them.

With label smoothing, the gradient of a row's logits hangs on the sum of all of its terms, and in 16
bits the kernel's own sum is not in what it returns. Then blocks of classes are cut out of blocks of
whole rows. That makes the logits once more for each block of classes.

`INPUT_AND_WEIGHT` sums the weight's gradient over blocks of rows instead. It makes the logits once
where the exact pair makes them twice, and its sum has another order.

Chunked losses: Liger Kernel (P.-L. Hsu et al., 2024, https://arxiv.org/abs/2410.10989), Cut Your
Losses (E. Wijmans et al., 2024, https://arxiv.org/abs/2411.09009). Both sum in another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from remat.graph_capture.splitting.head_gradients import OfLoss, class_blocks, rows_gradient
from remat.graph_capture.splitting.head_loss import HeadLoss, blocks

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""Reductions, as torch numbers them."""
NO_CLASS = -1
"""The target of a row that the loss ignores, where a loss has only the class 0."""
CLASSES_MULTIPLE = 64
"""Blocks of classes are multiples of it, so that each begins at a line of the caches."""

_HEAD = "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight"
_FACTS = "int[] grid, int[] start, int[] stop, ScalarType dtype, int reduction, int ignore_index"
_SAVED = "Tensor total_weight, Tensor top, Tensor log_sum, Tensor? row_term"
_READ = f"Tensor gradient, {_HEAD}, {_SAVED}, {_FACTS}, int pieces"
_library = torch.library.Library("remat", "FRAGMENT")
_library.define(
    f"linear_cross_entropy({_HEAD}, {_FACTS}, int pieces)"
    " -> (Tensor loss, Tensor total_weight, Tensor top, Tensor log_sum)"
)
_library.define(
    f"linear_cross_entropy_smoothed({_HEAD}, {_FACTS}, int pieces) -> (Tensor loss, "
    "Tensor total_weight, Tensor top, Tensor log_sum, Tensor row_sum)"
)
_library.define(f"linear_cross_entropy_input({_READ}) -> Tensor")
_library.define(
    f"linear_cross_entropy_weight({_READ}) -> (Tensor weight_gradient, Tensor bias_gradient)"
)
_library.define(
    f"linear_cross_entropy_both({_READ})"
    " -> (Tensor input_gradient, Tensor weight_gradient, Tensor bias_gradient)"
)


def _opened(given: tuple[Any, ...]) -> tuple[HeadLoss, OfLoss, Tensor, Tensor]:
    """What an op of backward is given: the head, the loss's gradient, and what forward saved."""
    gradient, total, top, log_sum, row_term = given[0], *given[6:10]
    return HeadLoss(*given[1:6], *given[10:]), OfLoss(gradient, total, row_term), top, log_sum


@torch.library.impl(_library, "linear_cross_entropy", "CompositeExplicitAutograd")
def linear_cross_entropy(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(loss, total weight, maximum, logarithm of the sum)``, the last two a number a row."""
    return _losses(HeadLoss(*given), None)


@torch.library.impl(_library, "linear_cross_entropy_smoothed", "CompositeExplicitAutograd")
def linear_cross_entropy_smoothed(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same, and the sum of each row's logarithms, weighted where classes are: label smoothing.

    What becomes of those sums is up to the step that the op stands in.
    """
    one = HeadLoss(*given)
    row_sums = torch.empty(len(one.target), dtype=one.dtype, device=one.x.device)
    return *_losses(one, row_sums), row_sums


def _losses(one: HeadLoss, row_sums: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
        if row_sums is not None:
            row_sums[rows.of_loss] = one.weighted(log_p).sum([1])
        del log_p
    return *_reduced(one, picked, is_counted), top, log_sum


def _reduced(one: HeadLoss, picked: Tensor, is_counted: Tensor) -> tuple[Tensor, Tensor]:
    """``(loss, total weight)`` of rows with these logarithms: by eager's kernel, of one class.

    That class is 0, and may be the one that the user's loss ignores.
    """
    target = torch.where(is_counted, 0, NO_CLASS)
    if one.class_weight is None:
        return aten.nll_loss_forward(picked, target, None, one.reduction, NO_CLASS)
    of_row = one.class_weight[torch.where(is_counted, one.target, 0)].unsqueeze(1)

    def summed(of_rows: Tensor, reduction: int = SUM) -> Tensor:
        return aten.nll_loss_forward(of_rows, target, None, reduction, NO_CLASS)[0]

    weighted = picked * of_row
    if one.reduction == NONE:
        return summed(weighted, NONE), picked.new_zeros(())
    loss, total = summed(weighted), summed(of_row.neg())
    return (loss / total if one.reduction == MEAN else loss), total


@torch.library.impl(_library, "linear_cross_entropy_input", "CompositeExplicitAutograd")
def linear_cross_entropy_input(*given: Any) -> Tensor:
    """The gradient of x, by blocks of rows."""
    one, of, _, _ = _opened(given)
    made = torch.empty_like(one.x)
    for rows in one.row_blocks():
        of_logits = rows_gradient(one, of, rows)
        torch.mm(of_logits, one.weight, out=made[rows.a : rows.b])
        del of_logits
    return made


@torch.library.impl(_library, "linear_cross_entropy_weight", "CompositeExplicitAutograd")
def linear_cross_entropy_weight(*given: Any) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias, by blocks of classes; the second is empty without bias."""
    one, of, top, log_sum = _opened(given)
    of_weight = torch.empty_like(one.weight)
    of_bias = one.weight.new_empty((0,) if one.bias is None else (1, one.n_classes))
    block = class_blocks(one, of, top, log_sum)
    for a, b in blocks(one.n_classes, one.pieces, CLASSES_MULTIPLE):
        made = block(a, b)
        torch.mm(made.t(), one.x, out=of_weight[a:b])
        if one.bias is not None:
            of_bias[:, a:b] = made.sum([0], True)
        del made
    return of_weight, of_bias


@torch.library.impl(_library, "linear_cross_entropy_both", "CompositeExplicitAutograd")
def linear_cross_entropy_both(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias by blocks of rows; the last two summed over blocks."""
    one, of, _, _ = _opened(given)
    of_x, of_weight = torch.empty_like(one.x), torch.zeros_like(one.weight)
    of_bias = one.weight.new_zeros((0,) if one.bias is None else (1, one.n_classes))
    for rows in one.row_blocks():
        of_logits = rows_gradient(one, of, rows)
        torch.mm(of_logits, one.weight, out=of_x[rows.a : rows.b])
        of_weight.addmm_(of_logits.t(), one.x[rows.a : rows.b])
        if one.bias is not None:
            of_bias += of_logits.sum([0], True)
        del of_logits
    return of_x, of_weight, of_bias


FORWARD = torch.ops.remat.linear_cross_entropy.default
SMOOTHED = torch.ops.remat.linear_cross_entropy_smoothed.default
INPUT = torch.ops.remat.linear_cross_entropy_input.default
WEIGHT = torch.ops.remat.linear_cross_entropy_weight.default
INPUT_AND_WEIGHT = torch.ops.remat.linear_cross_entropy_both.default
