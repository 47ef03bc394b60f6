"""What forward does alike in each run is carried out; what it does otherwise is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import CaptureError


class Net(nn.Module):
    """Calls a function with itself and the batch before it computes."""

    def __init__(self, first: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(8, 8), first

    def forward(self, x: Tensor) -> Tensor:
        self.first(self, x)
        return torch.tanh(self.linear(x)).sum()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.generator)
        return torch.tanh(self.linear(x) + noise).sum()


def planned(model: nn.Module, x: Tensor) -> nn.Module:
    return remat.rematerialize(model, (x,), budget="100%", solver="store_all")


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older torch cannot trace a generator")
def test_draws_from_a_generator_of_the_models_own() -> None:
    model, x = Noisy(), torch.randn(4, 8)
    fast = planned(model, x)
    assert torch.equal(model.generator.get_state(), torch.Generator().manual_seed(3).get_state())

    def steps(step: nn.Module) -> list[Tensor]:
        model.generator.manual_seed(5)
        losses = [step(x).detach() for _ in range(3)]
        return [*losses, model.generator.get_state()]

    assert all(map(torch.equal, steps(model), steps(fast)))


WRITES: dict[str, Callable[[Any, Tensor], Any]] = {
    "an attribute": lambda self, x: setattr(self, "at", time.perf_counter_ns()),
    "a tree": lambda self, x: setattr(self, "at", {"x": x, "at": [0, time.perf_counter_ns()]}),
    "a text": lambda self, x: setattr(self, "at", str(time.perf_counter_ns())),
}


@pytest.mark.parametrize("what", WRITES)
def test_a_value_that_each_run_sets_otherwise_is_refused(what: str) -> None:
    model = Net(WRITES[what])
    with pytest.raises(
        CaptureError,
        match=r"set (item 1 of )?at outside forward: forward of Net sets it to .* run again",
    ):
        planned(model, torch.randn(4, 8))
    assert not hasattr(model, "at")


def test_a_value_that_each_run_sets_alike_is_set() -> None:
    model = Net(lambda self, x: setattr(self, "width", x.shape[1]))
    fast = planned(model, torch.randn(4, 8))
    fast(torch.randn(4, 8)).backward()
    assert vars(model)["width"] == 8
