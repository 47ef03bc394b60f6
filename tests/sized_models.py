"""Small models of the usual kinds, whose batches vary in size, and batches of any size for them.

`SIZED` maps a name to a function that returns a `Sized`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


@dataclass
class Sized:
    """A model, a batch of given sizes, what varies, and sizes to try."""

    model: nn.Module
    batch: Callable[..., Batch]
    dynamic: dict[str | int, Any]
    sizes: list[dict[str, int]]


class Block(nn.Module):
    """A transformer block with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.mlp(self.norms[1](x)))


class Gpt(nn.Module):
    """Tokens and their positions in, the mean loss out."""

    def __init__(
        self, width: int = 32, layers: int = 2, words: int = 50, longest: int = 512
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(layers)])
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    """Two convolutions with batch norm, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        self.body = nn.Sequential(
            *layers, nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x + self.body(x))


class ResNet(nn.Module):
    """Residual blocks between a stem and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12))
        self.body = nn.Sequential(Residual(12), Residual(12), nn.MaxPool2d(2), Residual(12))
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(self.stem(x)).mean((2, 3))), y)


class UNet(nn.Module):
    """Down, up, and the two joined."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.last = nn.GroupNorm(2, 8), nn.Conv2d(16, 3, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        wide = nn.functional.silu(self.norm(self.first(x)))
        deep = nn.functional.silu(self.deep(nn.functional.max_pool2d(wide, 2)))
        joined = self.last(torch.cat([wide, self.up(deep)], dim=1))
        return nn.functional.mse_loss(joined, x)


class Experts(nn.Module):
    """Each token is given to all experts, weighted by a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        made = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (made * weights.unsqueeze(-2)).sum(-1).pow(2).mean()


class Lstm(nn.Module):
    """Unrolled over six steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 16)
        for t in range(6):
            h, c = self.cell(x[:, t], (h, c))
        return self.head(h).pow(2).mean()


def gpt(width: int = 32, layers: int = 2) -> Sized:
    def batch(batch: int, seq: int) -> Batch:
        return torch.randint(50, (batch, seq)), torch.randint(50, (batch, seq))

    dims = {0: ("batch", 2, 16), 1: ("seq", 16, 512)}
    sizes = [(2, 16), (3, 129), (16, 64), (7, 32), (5, 333)]
    tried = [{"batch": b, "seq": s} for b, s in sizes]
    return Sized(Gpt(width, layers), batch, {"tokens": dims, "targets": dims}, tried)


def resnet() -> Sized:
    def batch(batch: int) -> Batch:
        return torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))

    dims = {0: ("batch", 2, 15)}
    return Sized(ResNet(), batch, {"x": dims, "y": dims}, [{"batch": b} for b in (2, 9, 12, 15)])


def u_net() -> Sized:
    def batch(side: int) -> Batch:
        return (torch.randn(2, 3, side, side),)

    dims = dict.fromkeys((2, 3), ("side", 16, 64, 8))
    return Sized(UNet(), batch, {"x": dims}, [{"side": s} for s in (16, 24, 48, 64)])


def experts() -> Sized:
    def batch(tokens: int) -> Batch:
        return (torch.randn(tokens, 16),)

    dims = {0: ("tokens", 4, 300)}
    return Sized(Experts(), batch, {"x": dims}, [{"tokens": n} for n in (4, 16, 33, 300)])


def lstm() -> Sized:
    def batch(batch: int) -> Batch:
        return (torch.randn(batch, 6, 8),)

    return Sized(Lstm(), batch, {0: {0: ("batch", 2, 32)}}, [{"batch": b} for b in (2, 8, 16, 31)])


SIZED: dict[str, Callable[[], Sized]] = {
    "gpt": gpt, "resnet": resnet, "u_net": u_net, "experts": experts, "lstm": lstm,
}  # fmt: skip
