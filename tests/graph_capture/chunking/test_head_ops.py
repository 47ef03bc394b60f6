"""The ops that run a head and its loss in chunks, beside eager's kernels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from remat.graph_capture.chunking.blocks import LEAST_ROWS, blocks, largest_block
from remat.graph_capture.chunking.head_ops import (
    CLASSES_MULTIPLE,
    FORWARD,
    INPUT,
    INPUT_AND_WEIGHT,
    SMOOTHED,
    WEIGHT,
)

SHAPES = tuple(
    (rows, width, classes)
    for rows, width in ((256, 32), (300, 48), (260, 16), (320, 96), (384, 64))
    for classes in (100, 300, 640, 1003)
)
"""Rows, width and classes. Blocks are of 36 and more: kernels for few rows sum otherwise."""
QUICK = 12
"""Of the losses, one in so many is tried of each shape by default."""
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "upcast": (torch.bfloat16, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
}
"""Of the head and of its loss."""
LOSSES = tuple(
    itertools.product((False, True), (False, True), (False, True), ("mean", "sum", "none"))
)
"""With a bias; with weights of classes; with smoothed labels; how the rows are reduced."""
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


IGNORED = (0, 7, 99, -1, -100, 1000)
"""What a loss of 100 classes may ignore: a class, the first and the last too, or none of them."""


def head(
    shape: tuple[int, int, int], dtype: torch.dtype, has_bias: bool, ignored: int
) -> dict[str, Any]:
    rows, width, classes = shape
    made = {
        "x": torch.randn(rows, width).to(dtype).requires_grad_(),
        "weight": (0.2 * torch.randn(classes, width)).to(dtype).requires_grad_(),
        "bias": torch.randn(classes).to(dtype).requires_grad_() if has_bias else None,
    }
    target = torch.randint(classes, (rows,))
    target[torch.rand(rows) < 0.1] = ignored
    return made | {"target": target, "ignored": ignored}


def eager(
    one: dict[str, Any], dtype: torch.dtype, weights: Tensor | None, reduction: str, smooths: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, list[Tensor]]:
    """Loss, its gradient, sums of logarithms, their gradient, gradients of what the head reads."""
    logits = functional.linear(one["x"], one["weight"], one["bias"]).to(dtype)
    log_p = functional.log_softmax(logits, 1)
    loss = functional.nll_loss(
        log_p, one["target"], weights, ignore_index=one["ignored"], reduction=reduction
    )
    gradient = torch.rand_like(loss) + 0.1
    wanted = [one[name] for name in ("x", "weight", "bias") if one[name] is not None]
    if not smooths:
        found = torch.autograd.grad(loss, wanted, gradient)
        return loss.detach(), gradient, None, None, list(found)
    sums = (log_p if weights is None else log_p * weights.view(1, -1)).sum(1)
    of_sums = -1e-3 * torch.rand_like(sums)
    found = torch.autograd.grad([loss, sums], wanted, [gradient, of_sums])
    return loss.detach(), gradient, sums.detach(), of_sums, list(found)


DRAWS = 8
"""Of random data for products: another order of sums seldom shows in 16 bits."""


def products_keep_their_bits(one: dict[str, Any], chunks: int) -> bool:
    """Whether the products of a head have the same bits in blocks, on this device and shape."""
    given = {name: one[name] for name in ("x", "weight", "bias")}
    return all(one_draw_keeps_its_bits(given, chunks) for _ in range(DRAWS))


def one_draw_keeps_its_bits(like: dict[str, Any], chunks: int) -> bool:
    x, weight, bias = (
        None if one is None else torch.randn(one.shape).to(one.dtype) for one in like.values()
    )
    rows, classes = blocks(len(x), chunks), blocks(len(weight), chunks, CLASSES_MULTIPLE)
    logits = functional.linear(x, weight, bias)
    given = torch.randn(logits.shape).to(logits.dtype)
    whole = logits, given @ weight, given.t() @ x
    in_blocks = (
        torch.cat([functional.linear(x[a:b], weight, bias) for a, b in rows]),
        torch.cat([given[a:b] @ weight for a, b in rows]),
        torch.cat([given[:, a:b].contiguous().t() @ x for a, b in classes]),
    )
    return all(map(torch.equal, whole, in_blocks))


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_some_losses_are_eagers_to_the_bit(shape: tuple[int, int, int], dtypes: str) -> None:
    """On 20 shapes, two losses and 3 numbers of chunks each, all losses among them."""
    first = (SHAPES.index(shape) + 4 * list(DTYPES).index(dtypes)) % QUICK
    require_eagers_bits(shape, dtypes, LOSSES[first::QUICK])


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_losses_are_eagers_to_the_bit(shape: tuple[int, int, int], dtypes: str) -> None:
    """On 20 shapes, 24 losses and 3 numbers of chunks each."""
    require_eagers_bits(shape, dtypes, LOSSES)


@pytest.mark.parametrize("ignored", IGNORED)
def test_whatever_a_loss_ignores_is_ignored(ignored: int) -> None:
    require_eagers_bits((256, 32, 100), "float32", LOSSES, ignored)


def require_eagers_bits(
    shape: tuple[int, int, int],
    dtypes: str,
    losses: Sequence[tuple[bool, bool, bool, str]],
    ignored: int = -100,
) -> None:
    torch.manual_seed(0)
    dtype, of_loss = DTYPES[dtypes]
    for has_bias, is_weighted, smooths, reduction in losses:
        one, label = (
            head(shape, dtype, has_bias, ignored),
            (has_bias, is_weighted, smooths, reduction),
        )
        weights = torch.rand(shape[2]).to(of_loss) if is_weighted else None
        loss, gradient, sums, of_sums, expected = eager(one, of_loss, weights, reduction, smooths)
        read = (*(one[name] for name in ("x", "weight", "bias", "target")), weights)
        row_term = None if of_sums is None else of_sums.unsqueeze(1)
        for chunks in (2, 3, 4):
            facts = ([], [], [], of_loss, REDUCTIONS[reduction], ignored, chunks)
            with torch.no_grad():
                found, *saved = (SMOOTHED if smooths else FORWARD)(*read, *facts)
                given = gradient, *read, *saved[:3], row_term, *facts
                of_x = INPUT(*given)
                of_weight, of_bias = WEIGHT(*given)
                nearly = INPUT_AND_WEIGHT(*given)
            gradients = [of_x, of_weight, *([of_bias.view(-1)] if has_bias else [])]
            pairs = [(found, loss), *zip(gradients, expected, strict=True)]
            pairs += [] if sums is None else [(saved[3], sums)]
            are_equal = all(torch.equal(*pair) for pair in pairs)
            # Where the library's own products differ in blocks, a head stays whole.
            assert are_equal or not products_keep_their_bits(one, chunks), (*label, chunks)
            for mine, eagers in pairs:
                torch.testing.assert_close(
                    mine, eagers, rtol=2e-2, atol=2e-2 * float(eagers.abs().max())
                )
            assert torch.equal(nearly[0], of_x)
            error = (nearly[1].double() - expected[1].double()).norm() / expected[1].double().norm()
            assert error < (1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(("n", "chunks", "multiple"), [(10, 3, 1), (7, 16, 1), (1000, 4, 64)])
def test_blocks_cover_all_once(n: int, chunks: int, multiple: int) -> None:
    found = blocks(n, chunks, multiple)
    assert [i for a, b in found for i in range(a, b)] == list(range(n))
    assert len(found) <= chunks
    assert all((b - a) % multiple == 0 for a, b in found[:-1])


@pytest.mark.parametrize("chunks", [2, 4, 8, 16])
def test_no_block_of_rows_is_short_or_longer_than_foretold(chunks: int) -> None:
    longest = 0
    for n in range(LEAST_ROWS, 1200):
        lengths = [b - a for a, b in blocks(n, chunks)]
        assert min(lengths) >= LEAST_ROWS // 2
        longest = max(longest, *lengths)
        assert longest <= largest_block(n, chunks)
