"""After a step, one quick test stands for the guards of the model: it sees all that they see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import RewriteError
from remat.rewriter.guards import forward
from remat.rewriter.guards.forward import Guards


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.last = nn.Linear(4, 4)
        self.last.weight = self.body[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.body(x))).sum()


def trained() -> tuple[Any, Any, Tensor]:
    model, x = Net(), torch.randn(3, 4)
    fast = remat.rematerialize(model, (x,), budget="150%", solver="store_all", check=False)
    for _ in range(2):
        fast(x).backward()
    return model, fast, x


def guards_of(fast: Any) -> Guards:
    return type(fast)._remat_guards


def put(module: nn.Module, name: str, value: Any) -> None:
    setattr(module, name, value)


def swap_data(parameter: Tensor, data: Tensor) -> None:
    parameter.data = data


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "frozen": (lambda m: m.body[0].bias.requires_grad_(False), "was trained .* frozen now"),
    "precision": (lambda m: m.body[2].double(), "was torch.float32 .* torch.float64 now"),
    "shape": (lambda m: swap_data(m.body[2].weight, torch.ones(5, 4)), r"of shape \[5, 4\] now"),
    "strides": (
        lambda m: swap_data(m.body[2].weight, torch.ones(4, 4).t()),
        r"of strides \[1, 4\] now",
    ),
    "untied": (
        lambda m: put(m.last, "weight", nn.Parameter(torch.ones(4, 4))),
        "was tied to .* another parameter now",
    ),
    "mode": (lambda m: m.body[1].eval(), "submodule body.1 .* in eval mode now"),
    "hook": (lambda m: m.body[2].register_forward_hook(print), "hook"),
    "submodule": (lambda m: put(m.body, "2", nn.Linear(4, 4)), "a submodule of Net"),
    "added module": (lambda m: m.body.append(nn.Linear(4, 4)), "body.3.* is there now"),
    "added buffer": (lambda m: m.last.register_buffer("b", torch.ones(1)), "last.b .* is there"),
    "removed": (lambda m: m.last.register_parameter("bias", None), "last.bias .* is missing now"),
    "renamed": (
        lambda m: put(m.last, "other", m.last._parameters.pop("bias")),
        "last.bias .* is missing now",
    ),
    "table": (lambda m: put(m.last, "_parameters", {}), "last.weight .* is missing now"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_after_a_step_is_refused_as_before_it(what: str) -> None:
    model, fast, x = trained()
    change, says = CHANGES[what]
    change(model)
    with pytest.raises(RewriteError, match=says):
        fast(x)


def test_a_step_after_another_looks_at_nothing_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast, x = trained()
    monkeypatch.setattr(forward, "named_state", lambda _: pytest.fail("looked"))
    monkeypatch.setattr(Guards, "_state", lambda _: pytest.fail("looked"))
    fast(x).backward()


def test_parameters_that_were_replaced_by_alike_ones_are_trained() -> None:
    model, fast, x = trained()
    model.body[2].weight = nn.Parameter(torch.ones(4, 4))
    fast(x).backward()
    fast(x).backward()
    assert model.body[2].weight.grad is not None


def test_a_model_whose_objects_change_at_each_step_is_tested_closely_in_the_end() -> None:
    model, fast, x = trained()
    for _ in range(2 * forward.MOST_LOOKS):
        model.body[2].bias = nn.Parameter(torch.ones(4))
        fast(x).backward()
        assert model.body[2].bias.grad is not None
    assert guards_of(fast)._looks == forward.MOST_LOOKS
