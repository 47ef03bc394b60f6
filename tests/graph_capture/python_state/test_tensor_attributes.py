"""What users set on tensors by name: on those of a batch, on parameters, on any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import CaptureError, StateChangedError
from tests.graph_capture.python_state.moments import OPTIONS, X
from tests.graph_capture.python_state.places import WIDTH

ON_GLOBAL = torch.ones(1)


class Scaled(nn.Module):
    """Reads a number from a tensor."""

    def __init__(self, read: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(WIDTH))
        self.held = torch.ones(1)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.read(self, x)


Where = tuple[Callable[[nn.Module, Tensor], Any], Callable[[Any, Tensor, float], None]]
"""Reads a number, and sets it to another one."""
WHERE: dict[str, Where] = {
    "input": (lambda m, x: x.gain, lambda m, x, v: setattr(x, "gain", v)),
    "input, if it is there": (
        lambda m, x: getattr(x, "gain", 1.0),
        lambda m, x, v: setattr(x, "gain", v) if v > 1 else None,
    ),
    "list on the input": (
        lambda m, x: x.gains[1], lambda m, x, v: setattr(x, "gains", [0.0, v]),
    ),
    "parameter": (
        lambda m, x: m.linear.weight.gain,
        lambda m, x, v: setattr(m.linear.weight, "gain", v),
    ),
    "parameter, if it is there": (
        lambda m, x: getattr(m.linear.bias, "gain", 1.0),
        lambda m, x, v: setattr(m.linear.bias, "gain", v) if v > 1 else None,
    ),
    "dict on a parameter": (
        lambda m, x: m.linear.weight.more["gain"],
        lambda m, x, v: setattr(m.linear.weight, "more", {"gain": v}),
    ),
    "buffer": (lambda m, x: m.table.gain, lambda m, x, v: setattr(m.table, "gain", v)),
    "plain tensor": (lambda m, x: m.held.gain, lambda m, x, v: setattr(m.held, "gain", v)),
    "global": (lambda m, x: ON_GLOBAL.gain, lambda m, x, v: setattr(ON_GLOBAL, "gain", v)),
}  # fmt: skip


@pytest.mark.parametrize("where", WHERE)
def test_a_number_on_a_tensor_counts(where: str) -> None:
    read, put = WHERE[where]
    model = Scaled(read)
    x = X.clone()
    put(model, x, 1.0)
    fast: Any = remat.rematerialize(model, (x,), **OPTIONS)
    assert torch.equal(fast(x), model(x))
    put(model, x, 3.0)
    with pytest.raises(StateChangedError, match=r"gain|more"):
        fast(x)


@pytest.mark.parametrize("where", ["input", "parameter", "list on the input"])
def test_a_cache_plans_for_each_number_beside_a_check(where: str) -> None:
    read, put = WHERE[where]
    model = Scaled(read)
    fast: Any = remat.rematerialize(model, **{**OPTIONS, "check": True})
    for value in (1.0, 3.0, 1.0):
        x = X.clone()
        put(model, x, value)
        assert torch.equal(fast(x), model(x))
    assert len(remat.plans(fast)) == 2


def test_what_no_code_loads_may_be_set() -> None:
    model = Scaled(lambda m, x: 1.0)
    fast: Any = remat.rematerialize(model, (X.clone(),), **OPTIONS)
    for name in ("first.png", "second.png"):
        x = X.clone()
        x.file_of_sample = name  # type: ignore[attr-defined]
        assert torch.equal(fast(x), model(x))


def test_a_parameter_that_is_replaced_has_its_own_number() -> None:
    model = Scaled(lambda m, x: m.linear.weight.gain)  # type: ignore[union-attr]
    model.linear.weight.gain = 1.0  # type: ignore[attr-defined]
    fast: Any = remat.rematerialize(model, (X,), **OPTIONS)
    model.linear.weight = nn.Parameter(model.linear.weight.detach().clone())
    model.linear.weight.gain = 2.0  # type: ignore[attr-defined]
    with pytest.raises(StateChangedError, match=r"gain of linear\.weight"):
        fast(X)


def test_a_tensor_on_a_tensor_is_refused_if_it_is_used() -> None:
    x = X.clone()
    x.mask = torch.ones(WIDTH)  # type: ignore[attr-defined]
    for read in (lambda m, x: x.mask, lambda m, x: x.mask[0], lambda m, x: x.mask.sum()):
        with pytest.raises(CaptureError, match="pass mask as an argument of its own"):
            remat.capture(Scaled(read), (x,))
    remat.capture(Scaled(lambda m, x: 1.0), (x,))


def test_forward_that_sets_a_number_on_a_tensor_is_refused() -> None:
    def seen(model: nn.Module, x: Any) -> float:
        x.times = getattr(x, "times", 0) + 1
        return 1.0

    with pytest.raises(CaptureError, match=r"sets it on the tensor args\[0\]"):
        remat.capture(Scaled(seen), (X.clone(),))
