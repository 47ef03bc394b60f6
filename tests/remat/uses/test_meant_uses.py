"""Uses that are as they are meant to be: all of them train by the plan, and nothing is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.remat.uses.planned_nets import (
    PLAN,
    PLANNINGS,
    Planning,
    cache,
    net,
    outcome,
    rows,
    whole,
)


def by_original(plan: Planning) -> None:
    model = net()
    planned = plan(model)
    whole(model)
    whole(planned)
    whole(model)


def evaluated_between(plan: Planning) -> None:
    """A validation without no_grad, also between forward and backward."""
    model = plan(net())
    for _ in range(2):
        output = model(rows())
        model.eval()(rows()).sum()
        model.train()
        output.sum().backward()


def gradients_of_inputs(plan: Planning) -> None:
    model, x = plan(net()).eval(), rows().requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    model.requires_grad_(False)
    model(x).sum().backward()
    assert x.grad is not None


def adversarial(plan: Planning) -> None:
    """Gradients of inputs by backward, which leaves some in parameters, between planned steps."""
    model = plan(net())
    whole(model, 1)
    for _ in range(2):
        for _ in range(2):
            model.eval()(rows().requires_grad_()).sum().backward()
        whole(model.train(), 1)


def looked_at(plan: Planning) -> None:
    """Parts are read, and the whole is trained; no hook stays behind."""
    model: Any = plan(net())
    assert model.head.weight.grad is None
    whole(model)
    assert not model.head.weight._post_accumulate_grad_hooks


def another_plan_of_it(plan: Planning) -> None:
    model = net()
    first: Any = plan(model)
    assert first.head is model.head
    whole(cache(model))


def given_up(plan: Planning) -> None:
    model = net()
    planned: Any = plan(model)
    assert planned.head is model.head
    del planned
    whole(model)


LEGITIMATE = {
    "plain": lambda plan: whole(plan(net())),
    "original": by_original,
    "evaluated between": evaluated_between,
    "gradients of inputs": gradients_of_inputs,
    "adversarial": adversarial,
    "looked at": looked_at,
    "another plan": another_plan_of_it,
    "given up": given_up,
    "inside another": lambda plan: whole(nn.Sequential(plan(net()), nn.Linear(1, 1))),
}


@pytest.mark.parametrize("planning", PLANNINGS)
@pytest.mark.parametrize("name", LEGITIMATE)
def test_uses_that_are_meant_are_not_warned_of(name: str, planning: str) -> None:
    assert outcome(LEGITIMATE[name], PLANNINGS[planning]) == (PLAN, [])
