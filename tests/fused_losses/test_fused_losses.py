"""Losses that make their gradient in forward: eager's peaks and bits, and nothing run twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import CaptureError, RewriteError
from tests.fused_losses.by_autograd import OneBranch
from tests.fused_losses.measure import Found, measured
from tests.fused_losses.models import Head
from tests.fused_losses.variants import LARGE, SMALL, VARIANTS, WIDE, Size, of
from tests.rows import rows

QUICK = ("views, +=", "func.grad_and_value", "backward()", "fused mlp")
CHECKPOINTED = tuple(name for name in VARIANTS if "checkpoint" in name)
OTHERS = tuple(name for name in VARIANTS if name not in (*QUICK, *CHECKPOINTED))


def require_eagers(found: Found) -> None:
    assert not found.differences
    assert abs(found.misjudged) <= 0.01
    assert found.beyond <= 0.02
    assert found.overhead == 0
    assert found.predicted_bytes == pytest.approx(found.plan_bytes, rel=0.01)


@pytest.mark.parametrize("name", QUICK)
def test_a_plan_at_100_percent_needs_no_more_than_eager_and_recomputes_nothing(name: str) -> None:
    require_eagers(measured(VARIANTS[name], WIDE))


@pytest.mark.slow
@pytest.mark.parametrize("size", [SMALL, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("name", OTHERS)
def test_so_does_every_other_way_to_write_one(name: str, size: Size) -> None:
    require_eagers(measured(VARIANTS[name], size))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["3 chunks, +=", "slices", "func.grad_and_value", "backward()"])
def test_and_where_the_logits_dominate(name: str) -> None:
    require_eagers(measured(VARIANTS[name], LARGE))


@pytest.mark.parametrize("name", rows(CHECKPOINTED, {"checkpoint"}.__contains__))
def test_in_the_bytes_of_a_checkpointed_loss_a_plan_recomputes_less(name: str) -> None:
    found = measured(VARIANTS[name], SMALL, "cut")
    assert not found.differences
    assert abs(found.misjudged) <= 0.01
    assert found.beyond <= 0
    assert found.overhead < found.own_overhead


def trained(model: nn.Module, step: Callable[[Any], None]) -> list[Tensor]:
    model.zero_grad()
    step(model)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("slices, +=", "100%"),
        pytest.param("slices, +=", "min", marks=pytest.mark.slow),
        pytest.param("func.grad_and_value", "100%", marks=pytest.mark.slow),
        pytest.param("func.grad_and_value", "min", marks=pytest.mark.slow),
        pytest.param("backward()", "100%", marks=pytest.mark.slow),
    ],
)
def test_what_arrives_at_the_loss_may_be_any_number_and_gradients_add_up(
    name: str, budget: str
) -> None:
    model, args = VARIANTS[name].make(Size(64, 128))
    fast = remat.rematerialize(model, args, budget=budget)

    def loss(module: nn.Module) -> Tensor:
        result: Any = module(*args)
        return result[0] if isinstance(result, tuple) else result

    def scaled(module: nn.Module) -> None:
        (loss(module) * 0.5).backward()

    def accumulated(module: nn.Module) -> None:
        for share in (0.25, 3.0):
            (loss(module) * share).backward()

    def both_open(module: nn.Module) -> None:
        (loss(module) + 0.3 * loss(module)).backward()

    for step in (scaled, accumulated, both_open):
        eager, ours = trained(model, step), trained(fast, step)
        assert all(map(torch.equal, eager, ours))


def test_a_backward_that_looks_at_the_value_that_arrives_is_refused_with_its_line() -> None:
    model = Head(of(OneBranch.apply), 128)
    with pytest.raises(CaptureError, match=r"(?s)torch\.where in place.*by_autograd\.py:\d+"):
        remat.capture(model, VARIANTS["add_"].make(Size(64, 128))[1])


@pytest.mark.slow
def test_a_tied_weight_in_two_open_forwards_is_refused_with_the_way_out() -> None:
    model, args = VARIANTS["tied, +="].make(Size(64, 128))
    fast: Any = remat.rematerialize(model, args, budget="100%")
    with pytest.raises(RewriteError, match="call backward for each loss, or"):
        (fast(*args) + fast(*args)).backward()


@pytest.mark.slow
def test_a_cache_plans_such_a_loss_for_each_shape() -> None:
    model, (x, target) = VARIANTS["slices, +="].make(SMALL)
    fast: Any = remat.rematerialize(model, budget="90%")
    for n in (512, 384, 512):
        batch = x[:n], target[:n]

        def step(module: Any, batch: Any = batch) -> None:
            module(*batch).backward()

        assert all(map(torch.equal, trained(model, step), trained(fast, step)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slices, +=", "func.grad_and_value"])
def test_by_inductor_such_a_loss_keeps_to_eagers_peak(name: str) -> None:
    model, args = VARIANTS[name].make(SMALL)
    fast = remat.rematerialize(model, args, budget="100%", compile=True)
    found = remat.check(model, fast, args, steps=1)
    assert found.equal
    assert found.plan_peak_bytes <= found.baseline_peak_bytes
