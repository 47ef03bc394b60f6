"""Fused linear losses that write their gradient out by hand, chunk by chunk, while forward runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Options(NamedTuple):
    """What such losses are told.

    Attributes
    ----------
    adds : how the gradient of the weight is added up: ``anew``, ``+=``, ``addmm_``, ``add_``, or
        from the ``first`` term on.
    slices : whether the gradient of the rows is written into slices, or made of a list; into
        which of them, ``views`` that were made before or by ``True`` those of the moment.
    scales : how backward multiplies by what arrives: ``anew`` or ``mul_``.
    wide_sum : add the weight's gradient up in float32.
    """

    chunks: int = 8
    adds: str = "anew"
    slices: bool | str = False
    scales: str = "anew"
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    wide_sum: bool = False


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Cross entropy of ``rows @ weight.T + bias``: no more logits than a chunk's at any time."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, how: Options
    ) -> Any:
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = torch.float32 if how.wide_sum else weight.dtype
        to_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        if how.adds == "first":
            to_weight = None
        to_bias = torch.zeros_like(bias) if bias is not None and needs_bias else None
        to_rows = torch.zeros_like(rows) if needs_rows and how.slices else None
        views = to_rows.chunk(how.chunks) if to_rows is not None else ()
        parts: list[Tensor] = []
        losses: list[Tensor] = []
        z_losses: list[Tensor] = []
        counted = (target != how.ignore_index).sum().clamp(min=1)
        start = 0
        for chunk, wanted in zip(rows.chunk(how.chunks), target.chunk(how.chunks), strict=True):
            logits = chunk @ weight.t()
            if bias is not None:
                logits = logits + bias
            loss, z_loss, by_logits = _chunk(logits.float(), wanted, how, counted)
            del logits
            by_logits = by_logits.to(chunk.dtype)
            losses.append(loss)
            z_losses.append(z_loss)
            if how.slices == "views" and needs_rows:
                views[len(losses) - 1].copy_(by_logits @ weight)
            elif to_rows is not None:
                to_rows[start : start + len(chunk)] = by_logits @ weight
            elif needs_rows:
                parts.append(by_logits @ weight)
            if how.adds == "first" and start == 0 and needs_weight:
                to_weight = by_logits.t() @ chunk
            elif to_weight is not None:
                to_weight = _added(to_weight, by_logits, chunk, how.adds)
            if to_bias is not None:
                to_bias += by_logits.sum(0)
            start += len(chunk)
            del by_logits
        if needs_rows and to_rows is None:
            to_rows = torch.cat(parts)
        del parts
        if to_weight is not None:
            to_weight = to_weight.to(weight.dtype)
        ctx.save_for_backward(to_rows, to_weight, to_bias)
        ctx.scales = how.scales
        result = torch.cat(losses) if how.reduction == "none" else torch.stack(losses).sum()
        if how.z_loss:
            metric = torch.stack(z_losses).sum()
            ctx.mark_non_differentiable(metric)
            return result, metric
        return result

    @staticmethod
    def backward(ctx: Any, given: Tensor, *_: Any) -> Any:
        to_rows, to_weight, to_bias = ctx.saved_tensors
        return (
            _scaled(to_rows, given, ctx.scales), _scaled(to_weight, given, ctx.scales),
            _scaled(to_bias, given, ctx.scales), None, None,
        )  # fmt: skip


def _chunk(
    logits: Tensor, wanted: Tensor, how: Options, counted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, z-loss and gradient of the logits of one chunk."""
    valid = (wanted != how.ignore_index).unsqueeze(1)
    index = torch.where(valid.squeeze(1), wanted, 0).unsqueeze(1)
    lse = logits.logsumexp(1, keepdim=True)
    picked = logits.gather(1, index)
    smooth = how.label_smoothing
    loss = lse - (1 - smooth) * picked
    if smooth:
        loss = loss - smooth * logits.mean(1, keepdim=True)
    z_loss = how.z_loss * lse.square()
    by_logits = (logits - lse).exp()
    if how.z_loss:
        loss = loss + z_loss
        by_logits = by_logits * (1 + 2 * how.z_loss * lse)
    if smooth:
        by_logits = by_logits - smooth / logits.shape[1]
    by_logits = by_logits.scatter_add(1, index, torch.full_like(picked, smooth - 1))
    by_logits = by_logits * valid
    loss = (loss * valid).squeeze(1)
    if how.reduction == "none":
        return loss, z_loss.sum(), by_logits
    share = 1 / counted if how.reduction == "mean" else 1.0
    return loss.sum() * share, (z_loss * valid).sum() * share, by_logits * share


def _added(total: Tensor, by_logits: Tensor, chunk: Tensor, adds: str) -> Tensor:
    if adds == "anew":
        return total + by_logits.t() @ chunk
    if adds in ("+=", "first"):
        total += torch.mm(by_logits.t(), chunk)
        return total
    if adds == "add_":
        return total.add_(by_logits.t() @ chunk)
    return total.addmm_(by_logits.t(), chunk)


def _scaled(gradient: Tensor | None, given: Tensor, scales: str) -> Tensor | None:
    if gradient is None:
        return None
    if given.dim():  # a loss for each row, of which only the sum has one gradient
        given = given[0]
    return gradient.mul_(given) if scales == "mul_" else gradient * given
