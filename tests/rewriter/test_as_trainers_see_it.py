"""Planned modules as trainers look at them: names, signatures, and a forward they may replace."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor, scale: float = 1.0, **options: Any) -> Tensor:
        return self.body(x) * scale


def cached(model: nn.Module, x: Tensor, **options: Any) -> Any:
    del x
    return remat.rematerialize(model, budget="100%", solver="cut", check=False, **options)


def rewritten(model: nn.Module, x: Tensor, **options: Any) -> Any:
    given = {"target": x} if options else {}
    return remat.rematerialize(
        model, (x,), budget="100%", solver="cut", check=False, **options, **given
    )


def difference(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize("planned", [cached, rewritten])
def test_name_and_signature_are_the_users(planned: Any) -> None:
    model, x = Tagger(), torch.randn(16, 8)
    module = planned(model, x)
    assert type(module).__name__ == module._get_name() == "Tagger"
    assert type(module).__module__ == __name__
    assert inspect.signature(module.forward) == inspect.signature(model.forward)
    assert inspect.signature(type(module).forward) == inspect.signature(Tagger.forward)
    with_loss = planned(model, x, loss_fn=difference)
    names = list(inspect.signature(with_loss.forward).parameters)
    assert names == ["x", "scale", "target", "options"]


@pytest.mark.parametrize("planned", [cached, rewritten])
def test_a_forward_that_is_replaced_is_replaced_on_the_planned_module_alone(planned: Any) -> None:
    model, x = Tagger(), torch.randn(16, 8)
    module = planned(model, x)
    calls: list[str] = []
    before = module.forward

    def counting(self: Any, *args: Any) -> Any:
        calls.append("called")
        return before(*args)

    module.forward = MethodType(counting, module)
    expected = model(x)
    assert calls == []
    assert torch.equal(module(x), expected)
    assert calls == ["called"]
    del module.forward
    assert torch.equal(module(x), expected)
    assert calls == ["called"]
    assert "forward" not in vars(model)


@pytest.mark.parametrize("planned", [cached, rewritten])
def test_a_forward_that_the_user_replaced_does_not_hide_the_plan(planned: Any) -> None:
    model, x = Tagger(), torch.randn(16, 8)
    own = model.forward
    model.forward = lambda x: own(x, scale=2.0)  # type: ignore[method-assign]  # as hooks do
    module = planned(model, x)
    output = module(x)
    assert torch.equal(output, own(x, scale=2.0))
    assert "CompiledFunction" in type(output.grad_fn).__name__
