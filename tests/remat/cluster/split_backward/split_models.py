"""Modules with one trait each that a backward in two parts meets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, ROWS = 8, 6


class Mlp(nn.Module):
    """A residual block with dropout."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class Attention(nn.Module):
    """Keys, queries and values of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, ROWS, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(ROWS, WIDTH))


class Shifted(nn.Module):
    """Two parameters whose gradient is the one that backward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.twin = (nn.Parameter(torch.ones(ROWS, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one + self.twin


class Viewed(nn.Module):
    """A parameter whose gradient is a view of the one that backward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.ones(ROWS * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x + self.flat.view(ROWS, WIDTH)


class Tied(nn.Module):
    """One weight in two products, whose gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.one(x)))


class Sliced(nn.Module):
    """Sums of gradients of parts, which eager adds up in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, :3].sin(), x[:, 3:], x[:, 1:4].cos()]
        wide = torch.cat(parts, 1) @ self.weight[:11] + x @ self.weight[11:19]
        return wide * x[0] + x[1:2].square()


class Lora(nn.Module):
    """A frozen weight, and trained ones of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.frozen.bias.requires_grad_(True)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.frozen(x) + self.b(self.a(x)))


class Convolved(nn.Module):
    """Batch norm, whose statistics forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x[:, None]))).sum(1) + x


class Half(nn.Module):
    """Products in half precision, as autocast makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def halved(linear: nn.Linear, y: Tensor) -> Tensor:
            return functional.linear(y.bfloat16(), linear.weight.bfloat16(), linear.bias.bfloat16())

        return x + halved(self.down, torch.relu(halved(self.up, x).float())).float()


def unused() -> nn.Module:
    """A block with a parameter that forward does not read."""
    block = Mlp()
    block.left = nn.Parameter(torch.ones(3))
    return block


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp, "attention": Attention, "shifted": Shifted, "viewed": Viewed, "tied": Tied,
    "sliced": Sliced, "lora": Lora, "convolved": Convolved, "half": Half, "unused": unused,
    "stack": lambda: nn.Sequential(Mlp(), Attention(), Lora(), Shifted()),
}  # fmt: skip
