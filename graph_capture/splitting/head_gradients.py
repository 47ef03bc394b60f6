"""The gradient of a head's logits, by blocks of rows and by blocks of classes, to eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from remat.graph_capture.splitting.head_loss import HeadLoss, Rows, blocks

aten = torch.ops.aten


class OfLoss(NamedTuple):
    """What backward hands to the loss.

    Attributes
    ----------
    gradient : of the loss. total : its total weight. row_term : with label smoothing, the gradient
        of each row's sum of logarithms, (m, 1); None without.
    """

    gradient: Tensor
    total: Tensor
    row_term: Tensor | None


def rows_gradient(one: HeadLoss, of: OfLoss, rows: Rows) -> Tensor:
    """The gradient of a block of rows of the logits, in x's dtype."""
    log_p = aten._log_softmax(one.logits(rows), 1, False)
    of_log_p = _nll_backward(one, of, log_p, rows.of_loss)
    if of.row_term is not None:
        of_log_p.add_(one.weighted(of.row_term[rows.of_loss]))
    made = aten._log_softmax_backward_data(of_log_p, log_p, 1, one.dtype)
    del log_p, of_log_p
    return one.whole_rows(made, rows.a, rows.b, rows.inside)


def _nll_backward(one: HeadLoss, of: OfLoss, log_p: Tensor, rows: slice) -> Tensor:
    handed = of.gradient[rows] if of.gradient.dim() else of.gradient
    return aten.nll_loss_backward(
        handed, log_p, one.target[rows], one.class_weight, one.reduction, one.ignore_index, of.total
    )


def class_blocks(
    one: HeadLoss, of: OfLoss, top: Tensor, log_sum: Tensor
) -> Callable[[int, int], Tensor]:
    """From a range of classes to their part of the gradient of all rows, in x's dtype."""
    if cuts_classes_out_of_rows(one.dtype, of.row_term):
        return _cut_out_of_rows(one, of)
    return _of_classes(one, of, top, log_sum)


def cuts_classes_out_of_rows(dtype: torch.dtype, row_term: object) -> bool:
    """Whether an exact block of classes needs whole rows: with smoothing, or a loss in 16 bits."""
    return row_term is not None or dtype.itemsize < torch.float32.itemsize


def _cut_out_of_rows(one: HeadLoss, of: OfLoss) -> Callable[[int, int], Tensor]:
    def block(a: int, b: int) -> Tensor:
        made = one.x.new_empty(one.x.shape[0], b - a)
        for rows in one.row_blocks():
            made[rows.a : rows.b] = rows_gradient(one, of, rows)[:, a:b]
        return made

    return block


def _of_classes(
    one: HeadLoss, of: OfLoss, top: Tensor, log_sum: Tensor
) -> Callable[[int, int], Tensor]:
    of_rows = top, log_sum, _row_sums(one, of, top)
    every = torch.arange(len(one.target), device=one.x.device)

    def block(a: int, b: int) -> Tensor:
        made = _class_gradients(one, a, b, of_rows, every)
        return one.whole_rows(made, 0, one.x.shape[0], one.chosen_here).contiguous()

    return block


def _row_sums(one: HeadLoss, of: OfLoss, like: Tensor) -> Tensor:
    """The sum of each row of the loss's gradient: that of the target, as no other class has one."""
    sums = torch.empty_like(like)
    at = torch.where(one.target != one.ignore_index, one.target, 0).unsqueeze(1)
    for a, b in blocks(len(one.target), one.pieces):
        rows = slice(a, b)
        # Only the shape of the logarithms is read.
        log_p = like[rows].expand(-1, one.n_classes)
        sums[rows] = _nll_backward(one, of, log_p, rows).gather(1, at[rows])
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
