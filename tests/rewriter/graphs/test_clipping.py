"""A loop that clips gradients which updates have used is told of it, once; others are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils import clip_grad_value_ as limited
from torch.optim import SGD

import remat
from remat.rewriter.graphs.updating import ClippingWatch
from tests.models import make


def planned() -> tuple[nn.Module, SGD, tuple[Any, ...]]:
    model, args, *_ = make("plain")
    own = SGD(model.parameters(), lr=1e-2)
    fast = remat.rematerialize(
        model, args, optimizer_in_backward=own, budget="100%", check=False, solver="store_all"
    )
    return fast, own, args


def step(run: Callable[[], Any]) -> None:
    """What knows nothing of clipping."""
    run()


def by_norm(run: Callable[[], Any], module: nn.Module) -> None:
    step(run)
    clip_grad_norm_(module.parameters(), 1.0)


def by_value_under_another_name(run: Callable[[], Any], module: nn.Module) -> None:
    step(run)
    limited(module.parameters(), 1.0)


def through_the_package(run: Callable[[], Any], module: nn.Module) -> None:
    run()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)


LOOPS = [
    (by_norm, "clip_grad_norm_"),
    (by_value_under_another_name, "limited"),
    (through_the_package, "clip_grad_norm_"),
]


@pytest.mark.parametrize(("loop", "name"), LOOPS)
def test_the_function_and_its_line_are_named(loop: Any, name: str) -> None:
    watch, module = ClippingWatch("Model"), nn.Linear(2, 2)
    module(torch.ones(2)).sum().backward()
    line = loop.__code__.co_firstlineno + 2
    with pytest.warns(UserWarning, match=rf"in {loop.__name__} \(.*test_clipping.py:{line}\)"):
        loop(watch.look, module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for other, _ in LOOPS:
            other(watch.look, module)
    with pytest.warns(UserWarning, match=f"remat.rematerialize.* so {name}, .* finds no gradients"):
        loop(ClippingWatch("Model").look, module)


def test_a_training_step_warns_as_forward_runs_and_trains_on() -> None:
    fast, own, args = planned()

    def train() -> None:
        fast(*args).backward()
        assert clip_grad_norm_(fast.parameters(), 1.0) == 0
        own.step()

    with pytest.warns(UserWarning, match=r"the \w+ updates its .* so clip_grad_norm_, in train \("):
        train()


def test_a_loop_that_clips_nothing_is_not_warned() -> None:
    fast, own, args = planned()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            step(lambda: fast(*args).backward())
            own.step()
