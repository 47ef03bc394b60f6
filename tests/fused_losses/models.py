"""Small models with a fused loss at their end, and what people build around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 32

Loss = Callable[[Tensor, Tensor, Tensor | None, Tensor], Any]


class Head(nn.Module):
    """A trunk, and a head whose logits never are there at once."""

    def __init__(
        self,
        loss: Loss,
        vocabulary: int,
        *,
        bias: bool = False,
        frozen: str = "",
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, vocabulary, bias=bias)
        self.loss = loss
        if frozen:
            self.get_submodule(frozen).requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return self.loss(self.trunk(x), self.head.weight, self.head.bias, target)


class Tied(nn.Module):
    """One weight for embedding and head."""

    def __init__(self, loss: Loss, vocabulary: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.trunk = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.loss = loss

    def forward(self, ids: Tensor, target: Tensor) -> Any:
        return self.loss(self.trunk(self.embedding(ids)), self.embedding.weight, None, target)


class Scaled(Head):
    """What arrives at the loss is not one."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return super().forward(x, target) * 0.5


class SumOfTwo(Head):
    """Two losses of the same head, added up."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        y = self.trunk(x)
        first = self.loss(y, self.head.weight, self.head.bias, target)
        second = self.loss(y.tanh(), self.head.weight, self.head.bias, target.flip(0))
        return first + 0.3 * second


class Distilled(nn.Module):
    """A student and a frozen reference, each with its own head and loss."""

    def __init__(self, loss: Loss, vocabulary: int, width: int = WIDTH) -> None:
        super().__init__()
        self.student = Head(loss, vocabulary, width=width)
        self.reference = Head(loss, vocabulary, width=width).requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        with torch.no_grad():
            reference = self.reference(x, target)
        return torch.nn.functional.softplus(self.student(x, target) - reference)


class FusedMlp(torch.autograd.Function):
    """The derivative of the activation is made in forward, and kept in place of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        z = x @ up
        gate = torch.sigmoid(z)
        h = z * gate
        slope = gate * (1 + z * (1 - gate))
        ctx.save_for_backward(x, up, down, h, slope)
        return h @ down

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Any:
        x, up, down, h, slope = ctx.saved_tensors
        by_z = (given @ down.t()) * slope
        return by_z @ up.t(), x.t() @ by_z, h.t() @ given


class FusedMiddle(nn.Module):
    """A function of one's own in the middle."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.up = nn.Parameter(torch.randn(width, hidden) * 0.1)
        self.down = nn.Parameter(torch.randn(hidden, width) * 0.1)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return self.last(FusedMlp.apply(self.first(x), self.up, self.down)).square().mean()  # pyright: ignore
