"""Inputs that a collective still sends: the step waits, and eager's gradients come back."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import remat


class _Sent(torch.autograd.Function):
    """As a layer returns what a collective makes of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return AsyncCollectiveTensor(x.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(_Sent.apply(x))
        return x.square().mean()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    model(x).backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def test_rewritten_blocks_take_what_is_still_sent() -> None:
    torch.manual_seed(0)
    eager, x = Blocks(), torch.randn(4, 8)
    planned, sample = copy.deepcopy(eager), torch.randn(4, 8, requires_grad=True)
    for i, block in enumerate(planned.blocks):
        planned.blocks[i] = remat.rematerialize(block, (sample,), budget="min", check=False)
    expected, found = gradients(eager, x), gradients(planned, x)
    assert len(expected) == 7
    assert all(map(torch.equal, expected, found))


def test_one_tensor_that_is_sent_may_be_read_by_two_steps() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    fast = remat.rematerialize(model, (x,), budget="min", check=False)
    sent = _Sent.apply(x)
    (fast(sent).sum() + fast(sent).square().sum()).backward()
    found, x.grad = x.grad, None
    sent = _Sent.apply(x)
    (model(sent).sum() + model(sent).square().sum()).backward()
    assert found is not None
    assert torch.equal(found, x.grad)
