"""A batch that has one tensor twice, or tensors of one memory, where that makes another step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import PlanError, RewriteError, StateChangedError
from remat.rewriter.plans.loading import plan_of

WIDTH = 8
OPTIONS: dict[str, Any] = {"budget": "1GiB", "solver": "store_all"}


class Net(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.function(self.linear, a, b)


def writes(linear: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    b.add_(1)
    return (linear(a) * b + a).sum()


def asks(linear: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    return (linear(a) * (2 if a is b else 1) + b).sum()


def reads(linear: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    return (linear(a) * torch.tanh(b) * a).sum()


def once(requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_(requires_grad)
    return x, x


def twice(requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    x, _ = once()
    return x.clone().requires_grad_(requires_grad), x.clone().requires_grad_(requires_grad)


def overlapping() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH)
    return x[:4], x[2:]


Batch = Callable[[], tuple[Tensor, Tensor]]


def outcome(step: nn.Module, model: nn.Module, batch: Batch) -> list[Tensor]:
    model.zero_grad()
    given = batch()
    loss = step(*given)
    loss.backward()
    found = [loss.detach(), *given, *(p.grad for p in model.parameters())]
    return [*found, *(one.grad for one in given if one.grad is not None)]  # type: ignore[misc]


def is_exact(step: nn.Module, model: nn.Module, batch: Batch) -> bool:
    pairs = zip(outcome(model, model, batch), outcome(step, model, batch), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def with_gradient(batch: Callable[[bool], tuple[Tensor, Tensor]]) -> Batch:
    return lambda: batch(True)


KINDS: dict[str, tuple[Any, Batch, Batch]] = {
    "written": (writes, once, twice),
    "asked": (asks, once, twice),
    "read": (reads, once, twice),
    "with a gradient": (reads, with_gradient(once), with_gradient(twice)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_is_exact_for_one_tensor_and_for_two(kind: str) -> None:
    function, one, two = KINDS[kind]
    for batches in ((one, two, one), (two, one, two)):
        model = Net(function)
        fast: Any = remat.rematerialize(model, **OPTIONS)
        assert all(is_exact(fast, model, batch) for batch in batches)
        assert len(remat.plans(fast)) == (1 if kind == "read" else 2)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"read"}))
def test_a_plan_for_one_tensor_refuses_two_and_the_reverse(kind: str) -> None:
    function, one, two = KINDS[kind]
    for planned, other in ((one, two), (two, one)):
        model = Net(function)
        fast: Any = remat.rematerialize(model, planned(), **OPTIONS)
        with pytest.raises(StateChangedError, match=r"args\[0\] and args\[1\] of Net was"):
            fast(*other())


def test_memory_that_is_written_to_is_shared_with_no_other_tensor() -> None:
    fast: Any = remat.rematerialize(Net(writes), twice(), **OPTIONS)
    with pytest.raises(RewriteError, match=r"pass a copy, args\[0\]\.clone\(\)"):
        fast(*overlapping())


def test_memory_that_is_read_alone_may_be_shared() -> None:
    model = Net(reads)
    fast: Any = remat.rematerialize(model, twice(), **OPTIONS)
    assert is_exact(fast, model, overlapping)


def test_attention_over_one_tensor_takes_eagers_way() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.attention(a, b, b, need_weights=False)[0].sum()

    def one_tensor() -> tuple[Tensor, Tensor]:
        x = once()[0].view(2, 2, WIDTH)
        return x, x

    def two_tensors() -> tuple[Tensor, Tensor]:
        return one_tensor()[0], one_tensor()[0]

    model = Attending()
    fast: Any = remat.rematerialize(model, **OPTIONS)
    assert is_exact(fast, model, one_tensor)
    assert is_exact(fast, model, two_tensors)


def test_a_plan_file_holds_no_two_arguments_that_are_one() -> None:
    fast: Any = remat.rematerialize(Net(asks), once(), **OPTIONS)
    with pytest.raises(PlanError, match=r"pass a copy, args\[1\]\.clone\(\)"):
        plan_of(fast)
    assert torch.equal(copy.deepcopy(fast)(*once()), fast(*once()))
