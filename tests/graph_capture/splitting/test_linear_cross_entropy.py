"""The ops that run a head and its loss in pieces, beside eager's kernels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from remat.graph_capture.splitting.head_loss import blocks
from remat.graph_capture.splitting.linear_cross_entropy import (
    FORWARD,
    INPUT,
    INPUT_AND_WEIGHT,
    WEIGHT,
)

SHAPES = ((256, 32, 100), (300, 48, 1000), (320, 96, 1003), (260, 16, 4000), (384, 64, 2048))
"""Rows, width and classes. Blocks are of 64 rows and more: kernels for few rows sum otherwise."""
DTYPES = {"float32": (torch.float32, torch.float32), "upcast": (torch.bfloat16, torch.float32)}
"""Of the head and of its loss."""
LOSSES = tuple(itertools.product((False, True), (False, True), ("mean", "sum", "none")))
"""With a bias; with weights of classes; how the rows are reduced."""
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def head(shape: tuple[int, int, int], dtype: torch.dtype, has_bias: bool) -> dict[str, Any]:
    rows, width, classes = shape
    made = {
        "x": torch.randn(rows, width).to(dtype).requires_grad_(),
        "weight": (0.2 * torch.randn(classes, width)).to(dtype).requires_grad_(),
        "bias": torch.randn(classes).to(dtype).requires_grad_() if has_bias else None,
    }
    target = torch.randint(classes, (rows,))
    target[torch.rand(rows) < 0.1] = -100
    return made | {"target": target}


def eager(
    one: dict[str, Any], dtype: torch.dtype, weights: Tensor | None, reduction: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    logits = functional.linear(one["x"], one["weight"], one["bias"]).to(dtype)
    loss = functional.cross_entropy(logits, one["target"], weight=weights, reduction=reduction)
    gradient = torch.rand_like(loss)
    wanted = [one[name] for name in ("x", "weight", "bias") if one[name] is not None]
    return loss.detach(), gradient, list(torch.autograd.grad(loss, wanted, gradient))


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number_is_eagers_to_the_bit(shape: tuple[int, int, int], dtypes: str) -> None:
    """On 5 shapes, 12 losses and 3 numbers of pieces each."""
    torch.manual_seed(0)
    dtype, of_loss = DTYPES[dtypes]
    for has_bias, is_weighted, reduction in LOSSES:
        one = head(shape, dtype, has_bias)
        weights = torch.rand(shape[2]).to(of_loss) if is_weighted else None
        loss, gradient, expected = eager(one, of_loss, weights, reduction)
        read = (*(one[name] for name in ("x", "weight", "bias", "target")), weights)
        for pieces in (2, 3, 4):
            facts = ([], [], [], of_loss, REDUCTIONS[reduction], -100, pieces)
            with torch.no_grad():
                found, *saved = FORWARD(*read, *facts)
                of_x = INPUT(gradient, *read, *saved, *facts)
                of_weight, of_bias = WEIGHT(gradient, *read, *saved, *facts)
                nearly = INPUT_AND_WEIGHT(gradient, *read, *saved, *facts)
            gradients = [of_x, of_weight, *([of_bias.view(-1)] if has_bias else [])]
            assert torch.equal(found, loss), (has_bias, is_weighted, reduction, pieces)
            for mine, eagers in zip(gradients, expected, strict=True):
                assert torch.equal(mine, eagers), (has_bias, is_weighted, reduction, pieces)
            assert torch.equal(nearly[0], of_x)
            error = (nearly[1].double() - expected[1].double()).norm() / expected[1].double().norm()
            assert error < (1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(("n", "pieces", "multiple"), [(10, 3, 1), (7, 16, 1), (1000, 4, 64)])
def test_blocks_cover_all_once(n: int, pieces: int, multiple: int) -> None:
    found = blocks(n, pieces, multiple)
    assert [i for a, b in found for i in range(a, b)] == list(range(n))
    assert len(found) <= pieces
    assert all((b - a) % multiple == 0 for a, b in found[:-1])
