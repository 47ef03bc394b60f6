"""A linear head with its cross-entropy in chunks, so that all logits are never live at once.

Outputs are cut, sums never, so each number is made by eager's kernel over eager's sum. The weight's
gradient is cut by classes. Such a block needs each row's maximum and the logarithm of its sum,
which forward returns. `INPUT_AND_WEIGHT` sums over blocks of rows: the logits are made once.
Chunked losses: Liger Kernel (P.-L. Hsu et al., 2024, https://arxiv.org/abs/2410.10989), Cut Your
Losses (E. Wijmans et al., 2024, https://arxiv.org/abs/2411.09009). Both sum in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat.graph_capture.chunking.blocks import blocks
from remat.graph_capture.joint.nodes import aten

# A linear layer and its cross-entropy loss: their numbers, and logits by rows or by classes.


@dataclass(frozen=True)
class _HeadLoss:
    x: Tensor  # (n, d)
    weight: Tensor  # (classes, d)
    bias: Tensor | None  # (classes,)
    target: Tensor  # (m,)
    class_weight: Tensor | None  # (classes,)
    grid: Sequence[int]  # of the logits' rows, from `start` to `stop`, if the loss takes a part
    start: Sequence[int]
    stop: Sequence[int]
    dtype: torch.dtype  # of the loss
    reduction: int
    ignore_index: int
    chunks: int

    @property
    def n_classes(self) -> int:
        return self.weight.shape[0]

    @functools.cached_property
    def chosen(self) -> Tensor | None:
        """The rows of the logits that the loss takes, ascending; None for all."""
        if not self.grid:
            return None
        rows = torch.arange(self.x.shape[0]).view(*self.grid)  # on the CPU, so that nothing waits
        for dim, (a, b) in enumerate(zip(self.start, self.stop, strict=True)):
            rows = rows.narrow(dim, a, b - a)
        return rows.reshape(-1)

    @functools.cached_property
    def chosen_here(self) -> Tensor | None:
        return None if self.chosen is None else self.chosen.to(self.x.device)

    def row_blocks(self) -> Iterator[_Rows]:
        for a, b in blocks(self.x.shape[0], self.chunks):
            if self.chosen is None:
                yield _Rows(a, b, a, b, None)
            else:
                low, high = torch.searchsorted(self.chosen, torch.tensor([a, b])).tolist()
                inside = (self.chosen[low:high] - a).to(self.x.device)
                yield _Rows(a, b, low, high, inside)

    def logits(self, rows: _Rows) -> Tensor:
        """Of those of the block's rows that the loss takes, in the dtype of the loss."""
        return self._taken(linear(self.x[rows.a : rows.b], self.weight, self.bias), rows.inside)

    def _taken(self, logits: Tensor, chosen: Tensor | None) -> Tensor:
        if chosen is not None:
            logits = logits.index_select(0, chosen)
        return logits.to(self.dtype)

    def weighted(self, of_rows: Tensor) -> Tensor:
        """Numbers of rows by classes, or of rows alone, times the weights of classes if any."""
        return of_rows if self.class_weight is None else of_rows * self.class_weight.view(1, -1)

    def whole_rows(self, gradient: Tensor, a: int, b: int, chosen: Tensor | None) -> Tensor:
        """`gradient` of the logits that the loss takes, as one of rows a..b - 1, in x's dtype."""
        gradient = gradient.to(self.x.dtype)
        if chosen is None:
            return gradient
        whole = gradient.new_zeros(b - a, gradient.shape[1])  # zeros where the loss leaves rows out
        return whole.index_copy_(0, chosen, gradient)


@dataclass(frozen=True)
class _Rows:
    """Rows a..b - 1 of the logits, of which `inside` are rows low..high - 1 of the loss."""

    a: int
    b: int
    low: int
    high: int
    inside: Tensor | None

    @property
    def of_loss(self) -> slice:
        return slice(self.low, self.high)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


# The gradient of a head's logits, by blocks of rows and by blocks of classes, to eager's bits.


class _OfLoss(NamedTuple):
    gradient: Tensor
    total: Tensor
    row_term: Tensor | None  # label smoothing: of each row's sum of logarithms, (m, 1)


def _rows_gradient(one: _HeadLoss, of: _OfLoss, rows: _Rows) -> Tensor:
    """The gradient of a block of rows of the logits, in x's dtype."""
    log_p = aten._log_softmax(one.logits(rows), 1, False)
    of_log_p = _nll_backward(one, of, log_p, rows.of_loss)
    if of.row_term is not None:
        of_log_p.add_(one.weighted(of.row_term[rows.of_loss]))
    made = aten._log_softmax_backward_data(of_log_p, log_p, 1, one.dtype)
    del log_p, of_log_p  # `whole_rows` may make another block, and three are what is planned for
    return one.whole_rows(made, rows.a, rows.b, rows.inside)


def _nll_backward(one: _HeadLoss, of: _OfLoss, log_p: Tensor, rows: slice) -> Tensor:
    handed = of.gradient[rows] if of.gradient.dim() else of.gradient
    return aten.nll_loss_backward(
        handed, log_p, one.target[rows], one.class_weight, one.reduction, one.ignore_index, of.total
    )


def cuts_classes_out_of_rows(dtype: torch.dtype, row_term: object) -> bool:
    # A smoothed row's gradient depends on the sum of its terms, which in 16 bits no kernel returns.
    # Then blocks of classes are cut out of whole rows, and the logits made once more for each.
    return row_term is not None or dtype.itemsize < torch.float32.itemsize


def _cut_out_of_rows(one: _HeadLoss, of: _OfLoss) -> Callable[[int, int], Tensor]:
    def block(a: int, b: int) -> Tensor:
        made = one.x.new_empty(one.x.shape[0], b - a)
        for rows in one.row_blocks():
            made[rows.a : rows.b] = _rows_gradient(one, of, rows)[:, a:b]
        return made

    return block


def _of_classes(
    one: _HeadLoss, of: _OfLoss, top: Tensor, log_sum: Tensor
) -> Callable[[int, int], Tensor]:
    of_rows = top, log_sum, _row_sums(one, of, top)
    every = torch.arange(len(one.target), device=one.x.device)

    def block(a: int, b: int) -> Tensor:
        made = _class_gradients(one, a, b, of_rows, every)
        return one.whole_rows(made, 0, one.x.shape[0], one.chosen_here).contiguous()

    return block


def _row_sums(one: _HeadLoss, of: _OfLoss, like: Tensor) -> Tensor:
    """The sum of each row of the loss's gradient: that of the target, as no other class has one."""
    sums = torch.empty_like(like)
    at = torch.where(one.target != one.ignore_index, one.target, 0).unsqueeze(1)
    for a, b in blocks(len(one.target), one.chunks):
        rows = slice(a, b)
        log_p = like[rows].expand(-1, one.n_classes)  # only the shape of the logarithms is read
        sums[rows] = _nll_backward(one, of, log_p, rows).gather(1, at[rows])
    return sums


def _class_gradients(
    one: _HeadLoss, a: int, b: int, of_rows: tuple[Tensor, Tensor, Tensor], every: Tensor
) -> Tensor:
    top, log_sum, row_sums = of_rows
    n_block = b - a
    # One column more holds what a row's sum has outside of this block.
    log_p = torch.zeros(len(top), n_block + 1, dtype=one.dtype, device=top.device)
    bias = None if one.bias is None else one.bias[a:b]
    log_p[:, :n_block] = one._taken(linear(one.x, one.weight[a:b], bias), one.chosen_here)
    log_p[:, :n_block].sub_(top).sub_(log_sum)  # as torch's kernel: their sum would round otherwise
    at = torch.where((one.target >= a) & (one.target < b), one.target - a, n_block)
    of_log_p = torch.zeros_like(log_p)
    of_log_p[every, at] = row_sums[:, 0]
    return aten._log_softmax_backward_data(of_log_p, log_p, 1, one.dtype)[:, :n_block]


_NONE, _MEAN, _SUM = 0, 1, 2  # reductions, as torch numbers them
_NO_CLASS = -1  # the target of a row that the loss ignores, where a loss has only the class 0
CLASSES_MULTIPLE = 64  # blocks of classes are such, so that each begins at a line of the caches

_HEAD = "Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight"
_FACTS = "int[] grid, int[] start, int[] stop, ScalarType dtype, int reduction, int ignore_index"
_SAVED = "Tensor total_weight, Tensor top, Tensor log_sum, Tensor? row_term"
_READ = f"Tensor gradient, {_HEAD}, {_SAVED}, {_FACTS}, int chunks"
_library = torch.library.Library("remat", "FRAGMENT")
_library.define(
    f"linear_cross_entropy({_HEAD}, {_FACTS}, int chunks)"
    " -> (Tensor loss, Tensor total_weight, Tensor top, Tensor log_sum)"
)
_library.define(
    f"linear_cross_entropy_smoothed({_HEAD}, {_FACTS}, int chunks) -> (Tensor loss, "
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


def _opened(given: tuple[Any, ...]) -> tuple[_HeadLoss, _OfLoss, Tensor, Tensor]:
    gradient, total, top, log_sum, row_term = given[0], *given[6:10]
    return _HeadLoss(*given[1:6], *given[10:]), _OfLoss(gradient, total, row_term), top, log_sum


@torch.library.impl(_library, "linear_cross_entropy", "CompositeExplicitAutograd")
def _linear_cross_entropy(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(loss, total weight, maximum, logarithm of the sum)``, the last two a number a row."""
    return _losses(_HeadLoss(*given), None)


@torch.library.impl(_library, "linear_cross_entropy_smoothed", "CompositeExplicitAutograd")
def _linear_cross_entropy_smoothed(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same, and the sum of each row's logarithms, weighted where classes are."""
    one = _HeadLoss(*given)
    row_sums = torch.empty(len(one.target), dtype=one.dtype, device=one.x.device)
    return *_losses(one, row_sums), row_sums


def _losses(one: _HeadLoss, row_sums: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    target = one.target
    picked = torch.empty(len(target), 1, dtype=one.dtype, device=one.x.device)
    top, log_sum = torch.empty_like(picked), torch.empty_like(picked)
    is_counted = target != one.ignore_index
    safe = torch.where(is_counted, target, 0).unsqueeze(1)  # an ignored target, -100, is no index
    for rows in one.row_blocks():
        logits = one.logits(rows)
        top[rows.of_loss] = logits.amax(1, keepdim=True)
        log_p = aten._log_softmax(logits, 1, False)
        del logits  # or it would still be there while the next block's is made
        picked[rows.of_loss] = log_p.gather(1, safe[rows.of_loss])
        # At the maximum, the logarithm of p is 0 less that of the sum, exactly.
        log_sum[rows.of_loss] = log_p.amax(1, keepdim=True).neg_()
        if row_sums is not None:
            row_sums[rows.of_loss] = one.weighted(log_p).sum([1])
        del log_p
    return *_reduced(one, picked, is_counted), top, log_sum


def _reduced(one: _HeadLoss, picked: Tensor, is_counted: Tensor) -> tuple[Tensor, Tensor]:
    """``(loss, total weight)`` of rows with these logarithms: by eager's kernel, of one class."""
    target = torch.where(is_counted, 0, _NO_CLASS)  # 0 may be a class that the loss ignores
    if one.class_weight is None:
        return aten.nll_loss_forward(picked, target, None, one.reduction, _NO_CLASS)
    of_row = one.class_weight[torch.where(is_counted, one.target, 0)].unsqueeze(1)

    def summed(of_rows: Tensor, reduction: int = _SUM) -> Tensor:
        return aten.nll_loss_forward(of_rows, target, None, reduction, _NO_CLASS)[0]

    weighted = picked * of_row
    if one.reduction == _NONE:
        return summed(weighted, _NONE), picked.new_zeros(())  # as eager's is without reduction
    loss, total = summed(weighted), summed(of_row.neg())
    return (loss / total if one.reduction == _MEAN else loss), total


@torch.library.impl(_library, "linear_cross_entropy_input", "CompositeExplicitAutograd")
def _linear_cross_entropy_input(*given: Any) -> Tensor:
    one, of, _, _ = _opened(given)
    made = torch.empty_like(one.x)
    for rows in one.row_blocks():
        # `out`, so that no block's product is there beside the whole.
        torch.mm(_rows_gradient(one, of, rows), one.weight, out=made[rows.a : rows.b])
    return made


@torch.library.impl(_library, "linear_cross_entropy_weight", "CompositeExplicitAutograd")
def _linear_cross_entropy_weight(*given: Any) -> tuple[Tensor, Tensor]:
    """By blocks of classes; the bias's gradient is empty without a bias."""
    one, of, top, log_sum = _opened(given)
    of_weight = torch.empty_like(one.weight)
    of_bias = one.weight.new_empty((0,) if one.bias is None else (1, one.n_classes))
    is_cut = cuts_classes_out_of_rows(one.dtype, of.row_term)
    # From a range of classes to their part of the gradient of all rows, in x's dtype.
    block = _cut_out_of_rows(one, of) if is_cut else _of_classes(one, of, top, log_sum)
    for a, b in blocks(one.n_classes, one.chunks, CLASSES_MULTIPLE):
        made = block(a, b)
        torch.mm(made.t(), one.x, out=of_weight[a:b])
        if one.bias is not None:
            of_bias[:, a:b] = made.sum([0], True)
        del made
    return of_weight, of_bias


@torch.library.impl(_library, "linear_cross_entropy_both", "CompositeExplicitAutograd")
def _linear_cross_entropy_both(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    one, of, _, _ = _opened(given)
    of_x, of_weight = torch.empty_like(one.x), torch.zeros_like(one.weight)
    of_bias = one.weight.new_zeros((0,) if one.bias is None else (1, one.n_classes))
    for rows in one.row_blocks():
        of_logits = _rows_gradient(one, of, rows)
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
