"""Modules that forward or the loss reaches, and that are no submodules of the model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import remat
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.python_state.state_guards import PythonState
from tests.graph_capture.python_state.moments import OPTIONS, X
from tests.graph_capture.python_state.places import WIDTH, Reader

ELSEWHERE: dict[str, nn.Module] = {}


def teacher() -> nn.Sequential:
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    made = nn.Sequential(inner, nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH).eval())
    return made.requires_grad_(False)


Found = tuple[nn.Module, Any]
"""A model and its loss."""


def of_loss(it: nn.Module) -> Found:
    return Reader1(), lambda y: (y - it(X)).square().mean()


def of_partial_loss(it: nn.Module) -> Found:
    def loss(of: nn.Module, y: Tensor) -> Tensor:
        return (y - of(X)).square().mean()

    return Reader1(), functools.partial(loss, it)


def of_method(it: nn.Module) -> Found:
    return Reader1(), Distance(it).measured


def in_list(it: nn.Module) -> Found:
    model = Holding()
    model.held = [it]
    return model, None


def in_plain_object(it: nn.Module) -> Found:
    model = Holding()
    model.held = {0: it}
    return model, None


def in_global(it: nn.Module) -> Found:
    ELSEWHERE["it"] = it
    return Reader1(), lambda y: (y - ELSEWHERE["it"](X)).square().mean()


class Reader1(Reader):
    def read(self) -> Any:
        return 1.0


class Distance:
    def __init__(self, to: nn.Module) -> None:
        self.to = to

    def measured(self, y: Tensor) -> Tensor:
        return (y - self.to(X)).square().mean()


class Holding(Reader1):
    held: Any

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.held[0](x)


WAYS: dict[str, Callable[[nn.Module], Found]] = {
    one.__name__: one
    for one in (of_loss, of_partial_loss, of_method, in_list, in_plain_object, in_global)
}
Changed = Callable[[nn.Sequential], object]


def inner(it: nn.Sequential) -> Any:
    return it[0]


CHANGES: dict[str, Changed] = {
    "eval": lambda it: it.eval(),
    "a part in eval": lambda it: inner(it)[1].eval(),
    "a part in training": lambda it: it[2].train(),
    "another parameter": lambda it: setattr(
        inner(it)[0], "weight", nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
    ),
    "no bias": lambda it: setattr(it[1], "bias", None),
    "another buffer": lambda it: it[2].register_buffer("running_mean", torch.ones(WIDTH)),
    "another layer": lambda it: inner(it).__setitem__(1, nn.Tanh()),
    "one more layer": lambda it: inner(it).append(nn.Tanh()),
    "one layer less": lambda it: it.__delitem__(2),
    "a hook": lambda it: it[1].register_forward_hook(lambda *_: None),
    "a hook before": lambda it: inner(it).register_forward_pre_hook(lambda *_: None),
    "a hook of backward": lambda it: it[1].register_full_backward_hook(lambda *_: None),
    "a number of a layer": lambda it: setattr(inner(it)[1], "p", 0.1),
    "parametrized": lambda it: parametrizations.weight_norm(it[1]),
}  # type: ignore[dict-item]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
def test_a_change_is_noticed(way: str, change: str) -> None:
    it = teacher()
    model, loss_fn = WAYS[way](it)
    state = PythonState(model, loss_fn)
    assert state.first_change() is None
    CHANGES[change](it)
    assert state.first_change() is not None


@pytest.mark.parametrize("change", ["eval", "another parameter", "one more layer", "a hook"])
def test_a_cache_plans_for_what_is_there_now(change: str) -> None:
    it = teacher()
    model, loss_fn = of_loss(it)
    fast: Any = remat.rematerialize(model, loss_fn=loss_fn, **{**OPTIONS, "budget": "1GiB"})
    for _ in range(2):
        torch.manual_seed(5)
        expected = loss_fn(model(X))
        torch.manual_seed(5)
        assert torch.equal(fast(X), expected)
        CHANGES[change](it)
    assert len(remat.plans(fast)) == 2


def test_a_loss_that_sets_a_teacher_to_eval_itself_is_planned() -> None:
    it = teacher().train()
    model = Reader1()

    def loss_fn(y: Tensor) -> Tensor:
        it.eval()
        return (y - it(X)).square().mean()

    fast: Any = remat.rematerialize(model, (X,), loss_fn=loss_fn, **OPTIONS)
    assert it.training
    assert torch.equal(fast(X), loss_fn(model(X)))
    assert not it.training
    assert torch.equal(fast(X), loss_fn(model(X)))


def test_a_teacher_that_forward_writes_to_is_refused_by_its_name() -> None:
    it = teacher()
    it[2].train()
    model, loss_fn = of_loss(it)
    with pytest.raises(CaptureError, match=r"call eval\(\) on variable it of .*\[2\]|\['2'\]"):
        remat.capture(model, (X,), loss_fn=loss_fn)


def test_a_copy_of_the_model_updated_outside_is_read_as_it_is() -> None:
    model = Reader1()
    it = copy.deepcopy(model).requires_grad_(False)

    def loss_fn(y: Tensor) -> Tensor:
        return (y - it(X)).square().mean()

    fast: Any = remat.rematerialize(model, (X,), loss_fn=loss_fn, **OPTIONS)
    for _ in range(2):
        assert torch.equal(fast(X), loss_fn(model(X)))
        with torch.no_grad():
            for one in it.parameters():
                one.mul_(0.5)
