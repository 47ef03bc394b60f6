"""Small models that are no one graph, and a loss that does no more than add up."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, ROWS = 64, 384


class Branching(nn.Module):
    """A block of a residual net whose code looks at its values, as that of DETR's does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.statistics(x + self.body(self.norm(x)))
        if not torch.isfinite(x).all():
            x = x.clamp(-1e4, 1e4)
        return x


class Tower(nn.Module):
    """Blocks one after the other, and a mean."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or (Branching() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Gathering(nn.Module):
    """Two experts; how many rows each gets depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Branching().body for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        choice, made = self.router(x).argmax(-1), x
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero().squeeze(-1)
            made = made.index_add(0, rows, expert(x[rows]))
        return made


class Around(nn.Module):
    """A block that does something beside its work; all else as `Branching`."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Branching()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.block(torch.tanh(x).exp().sin())


class Drawing(nn.Module):
    """A block that is skipped by chance, by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Branching()

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.1 else self.block(torch.tanh(x).exp().sin())


LOSSES: list[Tensor] = []


class Balanced(nn.Module):
    """A block that adds a loss to a list of this file, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Branching()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(torch.tanh(x).exp().sin())
        LOSSES.append(x.square().mean())
        return x


class Told(nn.Module):
    """A block that reads a scale of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Branching()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(torch.tanh(SCALE["now"] * x).exp().sin())


SCALE = {"now": 1.0}


class Telling(Tower):
    """A tower that sets the scale before each block."""

    def __init__(self) -> None:
        super().__init__(*(Told() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            SCALE["now"] = 1.0 + i
            x = block(x)
        return x.square().mean()


class Slot:
    """An object that a module is given, as a cache is."""

    def __init__(self) -> None:
        self.seen: list[Any] = []


class Filling(nn.Module):
    """A block that keeps what it saw in an object it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Branching()

    def forward(self, x: Tensor, slot: Slot) -> Tensor:
        slot.seen.append(x.detach())
        return self.block(x)


class WithSlot(Tower):
    """A tower that gives each block one."""

    def __init__(self) -> None:
        super().__init__(*(Filling() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        slot = Slot()
        for block in self.blocks:
            x = block(x, slot)
        return x.square().mean()


def rows(seed: int = 0, count: int = ROWS) -> Tensor:
    """A batch."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
