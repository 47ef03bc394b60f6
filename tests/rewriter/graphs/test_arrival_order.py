"""Gradients come in eager's order while DDP makes its buckets of it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.graph_capture.distributed.collectives import fake_ranks
from remat.graph_capture.tracing.step_module import apply_loss, with_loss
from remat.rewriter.user_module import module as module_of_user
from tests.block_models import Stack
from tests.block_models import rows as batch
from tests.models import MODELS, Case, make
from tests.rows import rows
from tests.steps import rewritten

OFTEN = (
    "group_and_layer_norm",
    "tied_weights",
    "attention_with_dropout",
    "batch_norm_in_place_relu",
)


def arrivals(case: Case, step: nn.Module | None = None) -> list[int]:
    """Places of parameters in the order in which a step, eager's or `step`, gives gradients."""
    model, args, kwargs, loss_fn, target = case
    found: list[int] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: found.append(i))  # type: ignore[misc]
        for i, parameter in enumerate(with_loss(model, loss_fn).parameters())
        if parameter.requires_grad
    ]
    if step is not None:
        result = step(*args, **kwargs, **({} if target is None else {"target": target}))
    else:
        result = apply_loss(loss_fn, model(*args, **kwargs), target)
    leaves = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
    sum(x.float().sum() for x in leaves if x.requires_grad).backward()  # type: ignore[union-attr]
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", rows(MODELS, lambda name: name in OFTEN))
def test_steps_have_eagers_order_when_ddp_asks_for_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_of_user, "is_order_noted", lambda: True)
    model, step, args = rewritten(name)
    ours = arrivals((model, args, *make(name)[2:]), step)
    assert ours == arrivals(make(name)) == list(step._remat_compiled_step.gradient_order)


def test_without_it_gradients_come_in_another_order() -> None:
    model, step, args = rewritten("group_and_layer_norm")
    ours = arrivals((model, args, *make("group_and_layer_norm")[2:]), step)
    assert sorted(ours) == sorted(step._remat_compiled_step.gradient_order)
    assert ours != list(step._remat_compiled_step.gradient_order)


@pytest.fixture(scope="module", params=["whole", "blocks"])
def planned(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    model, x = Stack(), batch()
    if request.param == "whole":
        return remat.rematerialize(model, (x,), budget="80%", solver="cut", check=False)
    return remat.rematerialize(model, (x,), blocks="layers.*", budget="80%", check=False)


def is_asked_for(module: nn.Module, n_ranks: int, *, rebuilt: bool = False, **how: Any) -> bool:
    """Whether a forward in DDP puts gradients in order: a fake group cannot reduce gradients."""
    asked: list[bool] = []
    original = module_of_user.is_order_noted

    def noted() -> bool:
        asked.append(original())
        return asked[-1]

    with fake_ranks(n_ranks), pytest.MonkeyPatch.context() as patch:
        wrapped: Any = DistributedDataParallel(module, **how)
        wrapped._has_rebuilt_buckets = rebuilt
        patch.setattr(
            module_of_user, "is_order_noted", lambda: asked.append(original()) or asked[-1]
        )
        wrapped(batch())
    assert len(set(asked)) == 1
    return asked[0]


@pytest.mark.parametrize("how", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_ddp_asks_until_its_buckets_are_made(planned: nn.Module, how: dict[str, Any]) -> None:
    assert is_asked_for(planned, 4, **how)
    assert not is_asked_for(planned, 4, rebuilt=True, **how)


def test_first_buckets_and_two_ranks_ask_for_nothing(planned: nn.Module) -> None:
    assert not is_asked_for(planned, 4, find_unused_parameters=True)
    assert not is_asked_for(planned, 2)


def test_gradients_that_are_released_are_warned_of() -> None:
    model, x = Stack(), batch()
    module = remat.rematerialize(
        model, (x,), budget="90%", solver="cut", check=False, accumulate=True
    )
    with fake_ranks(4), pytest.warns(UserWarning, match=r'Sharding\("ddp".*fills its buckets'):
        DistributedDataParallel(module)(batch())
    with fake_ranks(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        DistributedDataParallel(module)(batch())
