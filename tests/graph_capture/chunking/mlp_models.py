"""Small models whose MLPs set the peak, and may run in chunks or may not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HIDDEN = 32, 256


class Block(nn.Module):
    """A residual MLP, with a gate or without."""

    def __init__(
        self, act: nn.Module, *, gated: bool = False, bias: bool = True, inside: float = 0.0,
        hidden: int = HIDDEN,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, hidden, bias=bias)
        self.up = nn.Linear(WIDTH, hidden, bias=bias) if gated else None
        self.down = nn.Linear(hidden, WIDTH, bias=bias)
        self.act, self.inside = act, nn.Dropout(inside)
        self.after = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        hidden = self.act(self.gate(normed))
        if self.up is not None:
            hidden = hidden * self.up(normed)
        return x + self.after(self.down(self.inside(hidden)))


class Blocks(nn.Module):
    """Blocks with a loss of their output; a head with a cross-entropy if there are classes."""

    def __init__(self, blocks: list[nn.Module], classes: int = 0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes, bias=False) if classes else None

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        out = self.norm(self.blocks(x))
        if self.head is None:
            return functional.mse_loss(out, target)
        return functional.cross_entropy(self.head(out).flatten(0, 1), target)


MLPS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "gelu": (nn.GELU, {}),
    "gelu_without_bias": (nn.GELU, {"bias": False}),
    "relu": (nn.ReLU, {}),
    "silu": (nn.SiLU, {}),
    "swiglu": (nn.SiLU, {"gated": True, "bias": False}),
    "swiglu_with_bias": (nn.SiLU, {"gated": True}),
    "reglu": (nn.ReLU, {"gated": True}),
}


def made(
    name: str, n_blocks: int = 3, rows: int = 64, dtype: torch.dtype = torch.float32, **more: Any
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Blocks, and a batch of four sequences of so many rows."""
    torch.manual_seed(0)
    act, options = MLPS[name]
    blocks: list[nn.Module] = [Block(act(), **{**options, **more}) for _ in range(n_blocks)]
    return Blocks(blocks).to(dtype), batch(rows, dtype)


def batch(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x, target = (torch.randn(4, rows, WIDTH, dtype=dtype) for _ in range(2))
    return x, target
