"""Smoothed labels with weights of classes: their weights are summed as eager sums them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.graph_capture.tracing.trace import trace

TARGET = "remat.sum_of_class_weights.default"


class Segmenter(nn.Module):
    """A class for each pixel."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = nn.Conv2d(3, 7, 1), options
        self.register_buffer("weight", torch.rand(7))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        weight: Any = self.weight
        return functional.cross_entropy(self.layer(x), target, weight=weight, **self.options)


def batch(ignored: int = -100) -> tuple[Tensor, Tensor]:
    target = torch.randint(7, (4, 9, 11))
    return torch.randn(4, 3, 9, 11), target.masked_fill(torch.rand(4, 9, 11) < 0.2, ignored)


@pytest.mark.parametrize("ignored", [-100, 3])
def test_gradients_are_eagers_to_the_bit_where_pixels_are_ignored(ignored: int) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model = Segmenter(label_smoothing=0.1, ignore_index=ignored)
        args = batch(ignored)
        assert any(op.target == TARGET for op in trace(model, args).graph.ops)
        fast = remat.rematerialize(model, args, budget="100%", check=False)
        assert remat.check(model, fast, args, steps=1).differences == ()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "reduction": "sum"}])
def test_other_losses_have_no_such_sum(options: dict[str, Any]) -> None:
    ops = trace(Segmenter(**options), batch()).graph.ops
    assert TARGET not in {op.target for op in ops}


def test_a_device_that_is_not_here_has_a_cost_for_it() -> None:
    graph = remat.capture(Segmenter(label_smoothing=0.1), batch(), device="h100")
    (op,) = (op for op in graph.ops if op.target == TARGET)
    assert op.cost_us > 0
