"""Levers together: five AdamW steps of each pair are eager's, and each lever does its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.schedules.schedule import Fetch
from tests.rows import rows
from tests.sized_models import Block

WORDS, WIDTH, LONGEST = 64, 32, 64


class Scaled(nn.Module):
    """A transformer whose logits are scaled by a number of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, 4) for _ in range(4)])
        self.head, self.scale = nn.Linear(WIDTH, WORDS), 1.5

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(number: int, length: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(number)
    tokens = torch.randint(WORDS, (4, length + 1), generator=made)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def made() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


SIZES = {1: ("length", 16, LONGEST)}
LEVERS: dict[str, Callable[[Scaled], dict[str, Any]]] = {
    "host": lambda _: {"host": "1GiB"},
    "optimizer_in_backward": lambda model: {
        "optimizer_in_backward": torch.optim.AdamW(model.parameters())
    },
    "accumulate": lambda _: {"accumulate": True},
    "float_inputs": lambda _: {"float_inputs": ["scale"]},
    "dynamic": lambda _: {"dynamic": {"tokens": SIZES, "target": SIZES}},
}
TOGETHER = {  # and the budget
    "optimizer_in_backward, host": "50%",
    "optimizer_in_backward, host, float_inputs": "50%",
    "optimizer_in_backward, float_inputs": "80%",
    "optimizer_in_backward, dynamic": "80%",
    "optimizer_in_backward, dynamic, accumulate": "85%",
    "dynamic, float_inputs": "80%",
}


def planned(model: Scaled, levers: str, budget: str) -> tuple[nn.Module, Any]:
    given = {
        key: value for name in levers.split(", ") for key, value in LEVERS[name](model).items()
    }
    tokens, target = batch(0, LONGEST)
    step = remat.rematerialize(
        model, (tokens,), loss_fn=loss_of, target=target, budget=budget, verbose=False, **given
    )
    optimizer = given.get("optimizer_in_backward") or torch.optim.AdamW(model.parameters())
    return step, optimizer


QUICK = ("optimizer_in_backward, host", "optimizer_in_backward, dynamic")


@pytest.mark.parametrize("levers", rows(TOGETHER, QUICK.__contains__))
def test_five_steps_are_those_of_eager(levers: str) -> None:
    eager, model = made(), made()
    step, optimizer = planned(model, levers, TOGETHER[levers])
    own = torch.optim.AdamW(eager.parameters())
    for number in range(5):
        length = (LONGEST, 48, 23)[number % 3] if "dynamic" in levers else LONGEST
        if "float_inputs" in levers:
            eager.scale = model.scale = 1.5 + number / 8
        losses: list[Tensor] = []
        for part in range(2 if "accumulate" in levers else 1):
            tokens, target = batch(number % 3 + part, length)
            torch.manual_seed(number)
            losses.append(loss_of(eager(tokens), target))
            losses[-1].backward()
            torch.manual_seed(number)
            if part or "accumulate" not in levers:
                loss = step(tokens, target=target)
                loss.backward()
            else:
                with step.no_update():
                    loss = step(tokens, target=target)
                    loss.backward()
            assert torch.equal(loss, losses[-1])
        for one in (own, optimizer):
            one.step()
            one.zero_grad()
    for theirs, ours in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(theirs, ours)


def test_updates_and_copies_share_a_schedule() -> None:
    step, _ = planned(made(), "optimizer_in_backward, host", "50%")
    schedule = type(step).schedule
    assert schedule.updates
    assert any(isinstance(one, Fetch) for one in schedule.steps)
