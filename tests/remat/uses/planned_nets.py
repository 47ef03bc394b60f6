"""Models, ways to plan them, and what comes of a use of one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import RematError

WIDTH = 16
Planning = Callable[[nn.Module], nn.Module]
Use = Callable[[Planning], Any]
PLAN, REFUSED, WARNED = "a plan", "a refusal", "one warning"


class Net(nn.Module):
    """Two parts, and another way to call them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class LightningModule(nn.Module):
    """It is told by its name."""


class Lit(LightningModule, Net):
    """A model whose `training_step` a trainer calls."""


def net(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind()


def sequence() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def rows() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(8, WIDTH)


def train(call: Callable[..., Tensor], model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        call(rows()).sum().backward()
        optimizer.step()
    assert any(parameter.grad is not None for parameter in model.parameters())


def whole(model: nn.Module, steps: int = 3) -> None:
    train(model, model, steps)


def cache(model: nn.Module) -> nn.Module:
    return remat.rematerialize(model, budget="100%", solver="cut")


def rematerialized(model: nn.Module) -> nn.Module:
    return remat.rematerialize(model, (rows(),), budget="100%", solver="cut", check=False)


PLANNINGS: dict[str, Planning] = {"no batch": cache, "rematerialize": rematerialized}


def outcome(use: Use, plan: Planning) -> tuple[str, list[str]]:
    """What came of a use, and the warnings about it, of which each step might give one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            use(plan)
        except RematError:
            return REFUSED, []
    said = [
        str(one.message)
        for one in caught
        if "received gradients without its plan" in str(one.message)
    ]
    assert all(
        Path(one.filename).parent == Path(__file__).parent
        for one in caught
        if str(one.message) in said
    )
    return (WARNED if said else PLAN), said
