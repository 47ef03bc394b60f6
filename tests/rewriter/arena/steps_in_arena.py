"""Models of `tests.models` with an arena, and their steps beside those without one."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat.analysis.plan_figures import use_arena
from remat.rewriter.arena.arena import Arena
from remat.rewriter.user_module.module import RematModule
from tests.models import make
from tests.steps import rewritten

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def module_of(name: str) -> RematModule:
    return rewritten(name, "chen_sqrt")[1]


def in_arena(name: str) -> tuple[RematModule, Arena]:
    module = module_of(name)
    _, args, kwargs, _, target = make(name)
    return module, use_arena(module, args, kwargs, target=target)


def loss_of(name: str, module: nn.Module) -> Tensor:
    """Of one forward on the batch of that name, of a model that takes its loss."""
    _, args, kwargs, loss_fn, target = make(name)
    given = {**kwargs, "target": target} if loss_fn and target is not None else kwargs
    return module(*args, **given)


def trained(name: str, module: nn.Module, steps: int = 4) -> list[Any]:
    """Losses of some steps, and the parameters and buffers after them."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(module.parameters())
    losses: list[Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(name, module)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *module.state_dict().values()]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
