"""Results that are views of one tensor: eager's sums, and the peak that was planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.rewriter.checking.check import check
from remat.rewriter.user_module.module import RematModule
from tests.rows import each_nth

ROWS, WIDTH = 200, 32


class Net(nn.Module):
    def __init__(self, returned: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.returned = returned

    def forward(self, x: Tensor) -> Any:
        return self.returned(self.last(torch.tanh(self.first(x))))


def viewed(y: Tensor) -> tuple[Tensor, ...]:
    top = y[:1]
    return top, top, y[2:]


def read_before(y: Tensor) -> tuple[Tensor, ...]:
    twice = y * y
    return y.t(), twice[:2], y[0]


def spread(y: Tensor) -> tuple[Tensor, ...]:
    mean, log_scale = y[:, :16], y[:, 16:]
    drawn = mean + torch.randn_like(mean) * (0.5 * log_scale).exp()
    return drawn, mean, log_scale, (mean.square() + log_scale.exp() - log_scale).sum()


RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "one row": lambda y: y[0],
    "one column": lambda y: y[:, 0],
    "transposed": lambda y: y.t(),
    "expanded": lambda y: y.unsqueeze(0).expand(2, ROWS, WIDTH),
    "halves": lambda y: (y[:50], y[50:]),
    "chunks": lambda y: y.chunk(2, -1),
    "rows": lambda y: tuple(y[:4].unbind(0)),
    "three": lambda y: (y[0], y[1], y[2:]),
    "overlapping": lambda y: (y[:150], y[50:], y.t()),
    "the tensor and a view": lambda y: (y, y[0]),
    "the tensor and all of it": lambda y: (y, y.t()),
    "a view twice": viewed,
    "in a dictionary": lambda y: {"mean": y[:, :8], "spread": [y[:, 8:].exp(), y[:, 8:]]},
    "read after it is viewed": lambda y: (y.t(), y[0], y * 2, y.exp()),
    "views of views": lambda y: (y.t()[0], y[0], y.view(2, -1)[1], torch.tanh(y)),
    "in other shapes": lambda y: (y.view(50, -1), y.view(2, -1).t(), y.reshape(-1)),
    "mean and spread": spread,
    "without a gradient": lambda y: (y[:50], y[50:].detach(), y.detach()),
    "none but one has a gradient": lambda y: (y.detach(), y[50:]),
    "read before it is viewed": read_before,
}


AT_LEAST = ("a view twice", "mean and spread", "read before it is viewed", "views of views")
"""Planned for the least budget too."""


@pytest.mark.parametrize(
    ("what", "budget"),
    each_nth(2, [*((what, "100%") for what in RETURNED), *((what, "min") for what in AT_LEAST)]),
)
def test_views_that_are_returned_cost_what_was_planned(what: str, budget: str) -> None:
    model, x = Net(RETURNED[what]), torch.randn(ROWS, WIDTH)
    fast = remat.rematerialize(model, (x,), budget=budget, solver="auto", time_limit_s=5)
    assert isinstance(fast, RematModule)
    found = check(model, fast, (x,), steps=1)
    assert found.differences == ()
    prediction = type(fast)._remat_prediction
    assert prediction is not None
    assert found.plan_peak_bytes == prediction.peak_bytes


def test_a_plan_for_all_that_eager_keeps_takes_no_more() -> None:
    """The gradients of views are added up in the step, where autograd would hold all of them."""
    model, x = Net(lambda y: (y, y.t())), torch.randn(ROWS, WIDTH)
    fast = remat.rematerialize(model, (x,), budget="100%", solver="store_all", check=False)
    found = check(model, fast, (x,), steps=1)
    assert found.plan_peak_bytes == found.baseline_peak_bytes


def test_a_view_that_its_caller_changes_is_an_error_or_exact() -> None:
    model, x = Net(lambda y: (y[:50], y[50:])), torch.randn(ROWS, WIDTH)
    fast = remat.rematerialize(model, (x,), budget="100%", solver="store_all")

    def gradient(step: nn.Module) -> Tensor:
        model.zero_grad()
        top, rest = step(x)
        (top.mul_(3).sum() + rest.square().sum()).backward()
        assert model.last.weight.grad is not None
        return model.last.weight.grad.clone()

    assert torch.equal(gradient(model), gradient(fast))
