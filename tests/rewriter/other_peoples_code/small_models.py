"""A layer to build odd models on, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import remat

WIDTH = 16


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)


def batch() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


def planned(model: nn.Module, *args: Any, **options: Any) -> Any:
    return remat.rematerialize(model, args, budget="100%", solver="store_all", **options)


def gradients(model: nn.Module, step: Callable[[], Tensor]) -> list[Tensor]:
    model.zero_grad()
    step().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
