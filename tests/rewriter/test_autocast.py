"""Weights that autocast casts: once for all uses in a region, as eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import CaptureError, StateChangedError
from tests.limits import AMPLE_S
from tests.rows import rows

WIDTH = 32
BFLOAT16 = torch.bfloat16


class Shared(nn.Module):
    """One weight that several calls use, in a way that is given."""

    def __init__(self, run: Callable[[Shared, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x).float().square().mean()


def batch() -> Tensor:
    return torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1))


def thrice(model: Shared, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(model.linear(x))
    return x


def beside_others(model: Shared, x: Tensor) -> Tensor:
    """Uses whose gradients arrive in an order of their own: branches, and a sum of both."""
    left, right = model.linear(x), model.linear(model.other(x))
    return model.other(left * torch.sigmoid(right)) + model.linear(left)


def convolved(model: Shared, x: Tensor) -> Tensor:
    y = model.convolution(x[None].transpose(1, 2))
    return model.convolution(nn.functional.gelu(y))


def as_a_product(model: Shared, x: Tensor) -> Tensor:
    return (x @ model.linear.weight) @ model.linear.weight.t() @ model.linear.weight


def in_both_precisions(model: Shared, x: Tensor) -> Tensor:
    return thrice(model, x).float() + model.linear.weight.square().mean()


def in_both_precisions_before(model: Shared, x: Tensor) -> Tensor:
    size = model.linear.weight.square().mean() + model.linear.weight.abs().mean()
    return thrice(model, x).float() * size


def the_last_use_is_ready_first(model: Shared, x: Tensor) -> Tensor:
    first = model.linear(x)
    size = model.linear.weight.square().mean()
    return first + torch.tanh(model.other(torch.tanh(model.linear(model.other(x) * size))))


def tied_embedding(model: Shared, x: Tensor) -> Tensor:
    h = model.linear(model.embedding(x.argmax(1)))
    return nn.functional.linear(h, model.embedding.weight)


def once_without_gradient(model: Shared, x: Tensor) -> Tensor:
    y = model.linear(x)
    return model.linear(y) + model.linear(x).detach()


def in_two_regions(model: Shared, x: Tensor) -> Tensor:
    for _ in range(2):
        with torch.autocast("cpu", BFLOAT16):
            x = torch.tanh(model.linear(torch.tanh(model.linear(x))))
    return x


def in_a_region_that_keeps_nothing(model: Shared, x: Tensor) -> Tensor:
    with torch.autocast("cpu", BFLOAT16, cache_enabled=False):
        return thrice(model, x)


def in_regions_and_out_of_them(model: Shared, x: Tensor) -> Tensor:
    with torch.autocast("cpu", BFLOAT16):
        x = thrice(model, x)
        with torch.autocast("cpu", enabled=False):
            x = torch.tanh(x.float())
        return model.linear(x)


OUTSIDE = [
    thrice, beside_others, convolved, as_a_product, in_both_precisions,
    in_both_precisions_before, the_last_use_is_ready_first, tied_embedding, once_without_gradient,
    in_two_regions, in_a_region_that_keeps_nothing,
]  # fmt: skip
INSIDE = [in_two_regions, in_a_region_that_keeps_nothing, in_regions_and_out_of_them]


@pytest.mark.parametrize("budget", rows(["100%", "min"], lambda budget: budget == "min"))
@pytest.mark.parametrize("run", OUTSIDE)
def test_under_autocast_gradients_are_eagers(run: Any, budget: str) -> None:
    model = Shared(run)
    require_eagers_bits(model, budget, enabled=True)


@pytest.mark.parametrize("run", INSIDE)
def test_in_regions_that_forward_enters_gradients_are_eagers(run: Any) -> None:
    require_eagers_bits(Shared(run), "100%", enabled=False)


def test_a_frozen_weight_is_cast_at_each_use_as_in_eager() -> None:
    model = Shared(thrice)
    model.linear.weight.requires_grad_(False)
    require_eagers_bits(model, "100%", enabled=True)


def test_half_precision_is_another_cast() -> None:
    require_eagers_bits(Shared(thrice), "100%", enabled=True, dtype=torch.float16)


def require_eagers_bits(
    model: Shared, budget: str, *, enabled: bool, dtype: torch.dtype = BFLOAT16
) -> None:
    x = batch()
    with torch.autocast("cpu", dtype, enabled=enabled):
        fast = remat.rematerialize(model, (x,), budget=budget, solver="cut", time_limit_s=AMPLE_S)
    found = []
    for step in (model, fast):
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=enabled):
            loss = step(x)
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_trained_input_of_several_uses_is_refused_and_the_ways_out_work() -> None:
    """Eager casts it once if the caller has made it, and at each use if another module has."""

    def uses(model: Shared, x: Tensor) -> Tensor:
        return model.linear(x) + model.other(x)

    model, x = Shared(uses), batch().requires_grad_()
    with torch.autocast("cpu", BFLOAT16), pytest.raises(CaptureError, match="cache_enabled"):
        remat.capture(model, (x,))
    with torch.autocast("cpu", BFLOAT16, cache_enabled=False):
        fast = remat.rematerialize(model, (x,), budget="100%", solver="store_all")
        fast(x)
    with torch.autocast("cpu", BFLOAT16), pytest.raises(StateChangedError, match="cache"):
        fast(x)
    with torch.autocast("cpu", BFLOAT16):
        low = x.to(BFLOAT16).detach().requires_grad_()
        remat.rematerialize(model, (low,), budget="100%", solver="store_all")
