"""What a plan and its check leave as the user had it: hooks, names, caches, lists."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import remat
from remat.rewriter.plans.loading import plan_of
from tests.rewriter.other_peoples_code.small_models import WIDTH, Base, batch, planned


def test_a_cached_function_keeps_no_tensor_of_the_trace() -> None:
    @functools.cache
    def table(size: int) -> Tensor:
        return torch.arange(float(size)).sin()

    class Cached(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + table(WIDTH))

    model, x = Cached(), batch()
    fast = planned(model, x)
    assert torch.equal(fast(x), model(x))


def test_the_check_leaves_what_is_upstream_alone() -> None:
    first, second, x = Base().linear, Base().linear, batch()
    cache = remat.rematerialize(second, budget="100%", solver="store_all")
    out = cache(first(x))
    assert first.weight.grad is None
    out.sum().backward()
    assert first.weight.grad is not None


def test_hooks_of_parameters_do_not_run_in_the_check() -> None:
    model, x = Base().linear, batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    planned(model, x)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_a_list_that_forward_consumes_is_left_to_the_user() -> None:
    class Popping(Base):
        def forward(self, parts: list[Tensor]) -> Tensor:
            return self.linear(parts.pop())

    parts = [batch()]
    planned(Popping(), parts)
    assert len(parts) == 1


def test_a_hook_of_the_whole_model_runs_once() -> None:
    model, x = Base().linear, batch()
    model.register_forward_hook(lambda _, args, out: out * 2)
    fast = planned(model, x)
    assert torch.equal(fast(x), model(x))


def test_the_users_names_stay_his() -> None:
    class Named(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("schedule", torch.linspace(0, 1, 5))
            self.code = "mine"

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

        def graph(self, n: int) -> int:
            return n + 1

    model, x = Named(), batch()
    fast = planned(model, x)
    assert torch.equal(fast.schedule, model.schedule)
    assert (fast.code, fast.graph(1)) == ("mine", 2)
    fast.code = "other"
    assert model.code == "other"
    assert plan_of(fast).schedule.steps


def test_a_registry_of_subclasses_is_not_told_of_a_plan() -> None:
    class Registered(Base):
        known: ClassVar[list[str]] = []

        def __init_subclass__(cls, **words: Any) -> None:
            super().__init_subclass__(**words)
            Registered.known.append(cls.__name__)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    class Own(Registered):
        pass

    planned(Own(), batch())
    assert Registered.known == ["Own"]


def test_a_loss_that_is_a_module_trains_its_own_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("weights", torch.rand(WIDTH))

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            return ((out - target).square() * self.scale * self.weights).mean()

    model, loss_fn, x, y = Base().linear, Scaled(), batch(), torch.zeros(8, WIDTH)
    fast = planned(model, x, loss_fn=loss_fn, target=y)
    loss_fn(model(x), y).backward()
    eager = [p.grad.clone() for p in (*model.parameters(), *loss_fn.parameters())]
    model.zero_grad()
    loss_fn.zero_grad()
    fast(x, target=y).backward()
    assert all(
        torch.equal(a, p.grad)
        for a, p in zip(eager, (*model.parameters(), *loss_fn.parameters()), strict=True)
    )
