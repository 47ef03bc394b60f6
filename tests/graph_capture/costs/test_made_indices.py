"""Integers of made data: kernels that do not look at their indices are given none out of range."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat.graph_capture.capture_api import capture
from remat.graph_capture.costs.op_times import sample_arguments, times_us
from remat.graph_capture.devices.meter import CpuMeter
from remat.graph_capture.tracing.trace import trace

ROWS, WIDTH, BAGS = 5, 16, 30


class Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(ROWS, WIDTH, mode=mode)

    def forward(self, words: Tensor, *offsets: Tensor) -> Tensor:
        return self.words(words, *offsets)


def made(model: nn.Module, args: tuple[Any, ...], target: str) -> tuple[Any, ...]:
    """Made arguments for a traced op."""
    joint = trace(model, args).joint
    (node,) = (node for node in joint.node_of_op.values() if target in str(node.target))
    return sample_arguments(node, joint.module)[0]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("is_flat", [False, True])
def test_rows_of_an_embedding_bag(mode: str, is_flat: bool) -> None:
    """Backward adds to rows at these indices, and looks at none of them."""
    words = torch.randint(ROWS, (BAGS, 7))
    args = (words.flatten(), torch.arange(0, words.numel(), 7)) if is_flat else (words,)
    for _ in range(5):
        _, rows, offsets, bags, *_ = made(Bags(mode), args, "_embedding_bag_backward")
        assert 0 <= rows.min() <= rows.max() < ROWS
        assert offsets[0] == 0 <= offsets.max() < words.numel()
        assert not bags.numel() or bags.max() < BAGS
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of an op whose cost is an estimate
        capture(Bags(mode), args)


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(3)])
def test_places_of_a_pooling_come_from_its_forward(pool: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 1), pool)
    target = "adaptive_max_pool2d_backward" if "Adaptive" in repr(pool) else "indices_backward"
    *_, places = made(model, (torch.randn(2, 3, 6, 6),), target)
    # Each window has a place of its own.
    assert torch.equal(places // 6 // 2, torch.arange(3).view(3, 1).expand_as(places))


def test_pivots_come_from_their_factorization() -> None:
    class LogDeterminant(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.slogdet(super().forward(x) + 9 * torch.eye(4))[1]

    _, pivots, *_ = made(LogDeterminant(4, 4), (torch.randn(4, 4),), "lu_solve")
    assert 1 <= pivots.min() <= pivots.max() <= 4


@torch.library.custom_op("remat_tests::rows", mutates_args=())
def rows_at(x: Tensor, at: Tensor) -> Tensor:
    return x[at]


@rows_at.register_fake
def _(x: Tensor, at: Tensor) -> Tensor:
    return x.new_empty(len(at), *x.shape[1:])


rows_at.register_autograd(lambda context, gradient: (gradient.new_zeros(2, 8), None))


def test_a_users_op_is_given_zeros() -> None:
    class Rows(nn.Linear):
        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            return rows_at(super().forward(x), at)

    _, at = made(Rows(8, 8), (torch.randn(2, 8), torch.ones(6, dtype=torch.int64)), "rows")
    assert torch.equal(at, torch.zeros(6, dtype=torch.int64))


@pytest.mark.parametrize("kind", [RuntimeError, IndexError, ValueError, MemoryError])
def test_whatever_a_kernel_raises_on_made_data_it_is_no_error_of_the_users(
    kind: type[Exception],
) -> None:
    def refused() -> None:
        raise kind

    failed = dict[str, Exception]()
    run: Callable[[], Any] = lambda: refused  # noqa: E731
    assert times_us({"op": run}, {"op": 0}, CpuMeter(), failed.__setitem__) == {}
    assert type(failed["op"]) is kind
