"""Backward is compiled when it first runs, in whichever threads that is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import remat
from remat.ranks.same_order import agreed_rewrite

ROUNDS, THREADS = 12, 3


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("restless")
def test_first_backwards_of_several_threads_give_eagers_gradients() -> None:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)]
    model, x = nn.Sequential(*layers), torch.randn(8, 16)
    schedule = remat.solve(remat.capture(model, (x,), loss_fn=torch.sum), "100%").schedule
    assert schedule is not None
    wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for _ in range(ROUNDS):
        module = agreed_rewrite(model, schedule)
        with ThreadPoolExecutor(THREADS) as threads:
            losses = [module(x) for _ in range(THREADS)]
            tasks = [threads.submit(gradients, module, loss) for loss in losses]
            found = [task.result() for task in tasks]
        assert all(all(map(torch.equal, one, wanted)) for one in found)


def gradients(module: nn.Module, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss.sum(), list(module.parameters()))
