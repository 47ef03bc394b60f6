"""Attention over positions that ranks share, and linear maps whose weights go round the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

WIDTH, POSITIONS, HEADS, HEAD = 64, 128, 4, 16


class GatheredKeys(nn.Module):
    """Each rank has the queries of its positions, and gathers the keys and values of all."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        group = dist.group.WORLD
        qkv = self.qkv(x).view(b, s, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind()
        k, v = (functional.all_gather_tensor_autograd(t.contiguous(), 2, group) for t in (k, v))
        own = torch.arange(s) + s * dist.get_rank()
        mask = own[:, None] >= torch.arange(s * dist.get_world_size())
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(b, s, WIDTH))


class Ulysses(nn.Module):
    """Ranks exchange positions for heads before attention, and back (DeepSpeed Ulysses, 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        n = dist.get_world_size()
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4).unbind()
        y = scaled_dot_product_attention(*map(_heads, (q, k, v)), is_causal=True)
        y = y.reshape(b, HEADS // n, n, s, HEAD).permute(2, 0, 1, 3, 4).contiguous()
        y = _exchanged(y).transpose(0, 1).reshape(b, HEADS, s, HEAD)
        return x + self.out(y.transpose(1, 2).reshape(b, s, WIDTH))


def _heads(t: Tensor) -> Tensor:
    """From all heads of own positions to all positions of own heads."""
    b, _, s, _ = t.shape
    n = dist.get_world_size()
    t = _exchanged(t.reshape(b, n, HEADS // n, s, HEAD).transpose(0, 1).contiguous())
    return t.permute(1, 2, 0, 3, 4).reshape(b, HEADS // n, n * s, HEAD)


def _exchanged(t: Tensor) -> Tensor:
    group = dist.group.WORLD
    return functional.all_to_all_single_autograd(t.flatten(), None, None, group).view(t.shape)


class _Rotate(torch.autograd.Function):
    """Gives a shard to the next rank; backward gives its gradient back."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        return _permuted(shard, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _permuted(gradients[0], -1)


def _permuted(t: Tensor, step: int) -> Tensor:
    n = dist.get_world_size()
    to = [(i + step) % n for i in range(n)]
    moved = functional.permute_tensor(t.flatten(), to, dist.group.WORLD)
    return functional.wait_tensor(moved).view(t.shape)


class Rotated(nn.Module):
    """A linear map whose weight is split over ranks; the parts go round (RTP, 2023).

    Where each part belongs is a buffer, so that all ranks run the same ops.
    """

    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        n, rank = dist.get_world_size(), dist.get_rank()
        self.weight = nn.Parameter(torch.randn(WIDTH // n, WIDTH) / WIDTH)
        self.register_buffer("order", torch.tensor([(rank - part) % n for part in range(n)]))

    def forward(self, x: Tensor) -> Tensor:
        weight, parts = self.weight, [linear(x, self.weight)]
        for _ in range(dist.get_world_size() - 1):
            weight = _Rotate.apply(weight)
            parts.append(linear(x, weight))
        found = torch.stack(parts).index_select(0, self.order)
        return x + torch.tanh(found.permute(1, 2, 0, 3).reshape(x.shape))


class Stacked(nn.Module):
    """Some of these, and a mean of squares."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def stacked(kind: type[nn.Module]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The same model on all ranks, and this rank's positions."""
    torch.manual_seed(0)
    model = Stacked(kind)
    torch.manual_seed(1 + dist.get_rank())
    return model, (torch.randn(2, POSITIONS // dist.get_world_size(), WIDTH),)
