"""Eager's loop over microbatches, and the same training by whole steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import remat
from remat.whole_step.running import WholeStep
from tests.sized_models import Gpt

Call = tuple[tuple[Any, ...], Any]
"""Positional arguments and a target."""


@dataclass
class Training:
    """A model with its optimizer, and what each step is given.

    Attributes
    ----------
    calls : of each microbatch of all steps; a step takes `count` of them.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[..., Tensor] | None
    calls: Sequence[Call]
    count: int

    def twin(self) -> Training:
        """The same with a model and an optimizer of its own."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        return Training(model, optimizer, self.loss_fn, self.calls, self.count)

    def eager(self, first: int = 0, steps: int = 5) -> list[Tensor]:
        """Train as eager does; all losses."""
        losses = list[Tensor]()
        for at in range(first, first + steps):
            for args, target in self.of_step(at):
                out = self.model(*args)
                loss = out if self.loss_fn is None else self.loss_fn(out, target)
                loss.backward()
                losses.append(loss.detach())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def planned(self, **asked: Any) -> WholeStep:
        """The whole step of this training."""
        args, target = self.calls[0]
        return remat.rematerialize(
            self.model, args, optimizer_in_backward=self.optimizer, microbatches=self.count,
            loss_fn=self.loss_fn, target=target, **asked,
        )  # fmt: skip

    def whole(self, step: WholeStep, first: int = 0, steps: int = 5) -> list[Tensor]:
        """Train by whole steps; all losses."""
        losses = list[Tensor]()
        for at in range(first, first + steps):
            calls = self.of_step(at)
            targets = None if self.loss_fn is None else [target for _, target in calls]
            losses += step([args for args, _ in calls], targets=targets)
        return losses

    def of_step(self, at: int) -> Sequence[Call]:
        """The microbatches of one step."""
        return self.calls[at * self.count : (at + 1) * self.count]


def gpt(count: int, steps: int = 5, layers: int = 4, width: int = 32, **changed: Any) -> Training:
    """A GPT with dropout, trained by AdamW."""
    torch.manual_seed(0)
    model = Gpt(width, layers, changed.get("words", 50))
    draw = (torch.randint(50, (4, 16)) for _ in range(2 * count * steps))
    calls = [((tokens, targets), None) for tokens, targets in zip(draw, draw, strict=True)]
    optimizer = changed.get("optimizer", adamw)(model.parameters())
    return Training(model, optimizer, None, calls, count)


def chain(count: int, steps: int = 5, **changed: Any) -> Training:
    """Equal layers of an MLP without dropout, with a loss outside."""
    torch.manual_seed(0)
    make = changed.get("layer", mlp_layer)
    model = nn.Sequential(*(make() for _ in range(6)), nn.Linear(32, 5))
    calls = [((torch.randn(8, 32),), torch.randn(8, 5)) for _ in range(count * steps)]
    optimizer = changed.get("optimizer", adamw)(model.parameters())
    return Training(model, optimizer, nn.functional.mse_loss, calls, count)


def mlp_layer() -> nn.Module:
    """A layer of `chain`."""
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW with decay."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def same(one: Training, other: Training) -> bool:
    """Whether parameters, buffers and states are equal to the bit."""
    models = one.model.state_dict(), other.model.state_dict()
    return _equal(*models) and _equal(one.optimizer.state_dict(), other.optimizer.state_dict())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one == other
