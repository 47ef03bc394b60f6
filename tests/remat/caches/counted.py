"""A model with batches of several sizes, and counts of what a cache does for its plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat import solver, step_planner
from remat.graph_capture.costs import op_costs

WIDTH, ROWS = 64, 512


class Net(nn.Module):
    """Layers with dropout, whose loss is part of forward."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        body = [
            m
            for _ in range(layers)
            for m in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(WIDTH))
        ]
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def rows(count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))


@dataclasses.dataclass
class Counts:
    """How often a cache traced, timed and solved."""

    traces: int = 0
    costs: int = 0
    solves: int = 0


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what caches do meanwhile."""
    counts = Counts()

    def counting(name: str, real: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            setattr(counts, name, getattr(counts, name) + 1)
            return real(*args, **options)

        return called

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_planner, "trace", counting("traces", step_planner.trace))
        patch.setattr(op_costs, "measure_costs", counting("costs", op_costs.measure_costs))
        patch.setattr(solver, "solve_within", counting("solves", solver.solve_within))
        yield counts


def stepped(step: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    """The loss of a step, the gradients, and the random stream after it."""
    model.zero_grad()
    torch.manual_seed(3)
    loss = step(x)
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *grads, torch.get_rng_state()]


def require_eagers_step(fast: Any, model: nn.Module, x: Tensor) -> None:
    expected, found = stepped(model, model, x), stepped(fast, model, x)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))
