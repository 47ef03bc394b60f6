"""Fused linear losses that let autograd make their gradient, chunk by chunk, while forward runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def chunk_loss(rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """Cross entropy of a chunk, added up."""
    logits = functional.linear(rows, weight, bias)
    return functional.cross_entropy(logits.float(), target, reduction="sum")


def _loss_and_metric(
    rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor
) -> tuple[Tensor, Tensor]:
    logits = functional.linear(rows, weight, bias)
    loss = functional.cross_entropy(logits.float(), target, reduction="sum")
    return loss, logits.float().mean().detach()


class ByTransform(torch.autograd.Function):
    """`torch.func.grad_and_value` of each chunk, as Liger's `LinearFusedBase` has it."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, chunks: int
    ) -> tuple[Tensor, Tensor]:
        to_weight = torch.zeros_like(weight)
        to_bias = torch.zeros_like(bias) if bias is not None else None
        parts: list[Tensor] = []
        total = torch.zeros((), device=rows.device)
        metrics: list[Tensor] = []
        wanted = (0, 1, 2) if bias is not None else (0, 1)
        transform = torch.func.grad_and_value(_loss_and_metric, argnums=wanted, has_aux=True)
        for chunk, label in zip(rows.chunk(chunks), target.chunk(chunks), strict=True):
            gradients, (loss, metric) = transform(chunk, weight, bias, label)
            to_weight.add_(gradients[1])
            if to_bias is not None:
                to_bias.add_(gradients[2])
            total.add_(loss)
            parts.append(gradients[0])
            metrics.append(metric)
            del gradients
        size = len(rows)
        to_rows = torch.cat(parts) / size
        ctx.save_for_backward(
            to_rows, to_weight / size, to_bias / size if to_bias is not None else None
        )
        metric = torch.stack(metrics).mean()
        ctx.mark_non_differentiable(metric)
        return total / size, metric

    @staticmethod
    def backward(ctx: Any, given: Tensor, *_: Any) -> Any:
        to_rows, to_weight, to_bias = ctx.saved_tensors
        return (
            to_rows * given, to_weight * given,
            None if to_bias is None else to_bias * given, None, None,
        )  # fmt: skip


class ByLeaves(torch.autograd.Function):
    """`torch.autograd.grad` on detached leaves, under `torch.enable_grad()`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, chunks: int
    ) -> Tensor:
        to_weight, to_rows = torch.zeros_like(weight), torch.empty_like(rows)
        to_bias = torch.zeros_like(bias) if bias is not None else None
        total = rows.new_zeros((), dtype=torch.float32)
        start = 0
        for chunk, label in zip(rows.chunk(chunks), target.chunk(chunks), strict=True):
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (chunk, weight)]
                if bias is not None:
                    leaves.append(bias.detach().requires_grad_())
                loss = chunk_loss(*leaves[:2], leaves[2] if bias is not None else None, label)
                gradients = torch.autograd.grad(loss, leaves)
            total += loss.detach()
            to_rows[start : start + len(chunk)] = gradients[0]
            to_weight += gradients[1]
            if to_bias is not None:
                to_bias += gradients[2]
            start += len(chunk)
            del loss, gradients, leaves
        ctx.save_for_backward(to_rows, to_weight, to_bias)
        return total

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        to_rows, to_weight, to_bias = ctx.saved_tensors
        return (
            to_rows * given, to_weight * given,
            None if to_bias is None else to_bias * given, None, None,
        )  # fmt: skip


class ByBackward(torch.autograd.Function):
    """`backward()` on detached leaves, whose `grad` adds itself up, as tiled losses have it."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, chunks: int
    ) -> Tensor:
        head = weight.detach().requires_grad_()
        leaves: list[Tensor] = []
        total = torch.zeros(())
        for chunk, label in zip(rows.chunk(chunks), target.chunk(chunks), strict=True):
            with torch.enable_grad():
                leaf = chunk.detach().requires_grad_()
                loss = chunk_loss(leaf, head, None, label)
                loss.backward()
            total = total + loss.detach()
            leaves.append(leaf)
        ctx.save_for_backward(torch.cat([leaf.grad for leaf in leaves]), head.grad)  # pyright: ignore
        return total

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        to_rows, to_weight = ctx.saved_tensors
        return to_rows * given, to_weight * given, None, None, None


class OneBranch(torch.autograd.Function):
    """As `ByTransform`, but backward looks at the value that arrives."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, chunks: int
    ) -> Tensor:
        return ByTransform.forward(ctx, rows, weight, bias, target, chunks)[0]

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        to_rows, to_weight, _ = ctx.saved_tensors
        if torch.ne(given, torch.tensor(1.0, device=given.device)):
            to_rows, to_weight = to_rows * given, to_weight * given
        return to_rows, to_weight, None, None, None


def by_checkpoints(
    rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, chunks: int
) -> Tensor:
    """The way without a function of one's own: a checkpoint around each chunk."""
    total = rows.new_zeros((), dtype=torch.float32)
    for chunk, label in zip(rows.chunk(chunks), target.chunk(chunks), strict=True):
        total = total + checkpoint(chunk_loss, chunk, weight, bias, label, use_reentrant=False)  # pyright: ignore
    return total / len(rows)
