"""The budget of several graphs: of a model in three parts, and of two models with one options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat.compile.graph_context import compiled_plans
from remat.graph_capture.devices.memory_events import measure_peak
from tests.limits import AMPLE_S

pytestmark = pytest.mark.slow

FEW = {"replays": 4, "solver": "cut", "time_limit_s": AMPLE_S}
WIDTH = 128


def part() -> nn.Sequential:
    layers = [m for _ in range(2) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers)


class Three(nn.Module):
    """Three parts with graph breaks between them, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = part(), part(), part()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(x)
        torch._dynamo.graph_break()
        return self.third(x).square().mean()


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = part()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x).square().mean()


def in_three(options: dict[str, Any]) -> tuple[list[nn.Module], Callable[[Tensor], Tensor]]:
    model = Three()
    return [model], torch.compile(model, backend="remat", options=options)


def two_models(options: dict[str, Any]) -> tuple[list[nn.Module], Callable[[Tensor], Tensor]]:
    models = [part(), WithLoss()]
    first, second = (torch.compile(m, backend="remat", options=options) for m in models)
    return models, lambda x: second(first(x))


def gradients(models: Sequence[nn.Module]) -> list[Tensor]:
    found = [p.grad for model in models for p in model.parameters()]
    return [gradient.clone() for gradient in found if gradient is not None]


@pytest.mark.parametrize("budget", ["100%", "min"])
@pytest.mark.parametrize(("make", "n_graphs"), [(in_three, 3), (two_models, 2)])
def test_the_sum_that_is_stated_before_training_is_measured(
    make: Any, n_graphs: int, budget: str
) -> None:
    torch.manual_seed(0)
    before = len(compiled_plans())
    models, step = make({**FEW, "budget": budget})
    x = torch.randn(1024, WIDTH)
    parameters = [p for model in models for p in model.parameters()]
    loss = step(x)
    plans = compiled_plans()[before:]
    assert len(plans) == n_graphs, "all are stated before the first backward"
    loss.backward()
    found = gradients(models)
    for parameter in parameters:
        parameter.grad = None
    del loss
    peak_bytes = sum(t.nbytes for t in [*parameters, x]) + measure_peak(lambda: step(x).backward())
    assert peak_bytes <= plans[-1].budget_bytes
    assert plans[-1].peak_bytes == pytest.approx(peak_bytes, rel=0.005)
    assert len(gradients(models)) == len(found)
    for a, b in zip(gradients(models), found, strict=True):
        torch.testing.assert_close(a, b)
