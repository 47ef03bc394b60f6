"""Small models of blocks, each with one trait that planning block by block meets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, ROWS = 64, 256


class Mlp(nn.Module):
    """A residual block that takes a second argument, and returns a tuple."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.p = p
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(
        self, x: Tensor, scale: Tensor | float = 1.0, mask: Tensor | None = None
    ) -> tuple[Tensor]:
        y = self.down(functional.gelu(self.up(self.norm(x)))) * scale
        return (x + functional.dropout(y, self.p, self.training),)


class Stack(nn.Module):
    """A linear map, blocks that all take `scale`, and a mean of squares."""

    def __init__(self, ps: Sequence[float] = (0.1,) * 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Mlp(p) for p in ps)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, *, learn: bool = True) -> Tensor:
        x = self.first(x)
        scale = 2 * self.scale if learn else torch.cos(x[:1]).detach()
        for layer in self.layers:
            x = layer(x, scale, mask=None)[0]
        return x.square().mean()


class Words(nn.Module):
    """Blocks, a head of 4,096 words, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4096)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.logits(x).float(), target)

    def logits(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


class Normed(nn.Module):
    """A convolutional residual block with running statistics."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def convolutional() -> nn.Sequential:
    """Blocks 1 to 3 between a first and a last layer."""
    blocks = [Normed(8) for _ in range(3)]
    first, last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16 * 16, 10)
    return nn.Sequential(first, *blocks, nn.Flatten(), last)


class Twice(Stack):
    """Runs its blocks twice a step."""

    def forward(self, x: Tensor, *, learn: bool = True) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x)[0]
        return x.mean()


class Beside(Stack):
    """Adds the input of its first block to the result of each."""

    def forward(self, x: Tensor, *, learn: bool = True) -> Tensor:
        given = x = self.first(x)
        for layer in self.layers:
            x = layer(x)[0] + given
        return x.mean()


class InPart(Stack):
    """Calls a part of a block by itself."""

    def forward(self, x: Tensor, *, learn: bool = True) -> Tensor:
        return super().forward(self.layers[0].get_submodule("norm")(x))


class OwnAutocast(Stack):
    """Enters autocast around its blocks."""

    def forward(self, x: Tensor, *, learn: bool = True) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


class LooksAtTracing(Stack):
    """Passes its blocks a mask only while it is traced."""

    def forward(self, x: Tensor, *, learn: bool = True) -> Tensor:
        mask = None if type(x) is Tensor else torch.ones(1)
        for layer in self.layers:
            x = layer(x, mask=mask)[0]
        return x.mean()


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH)
