"""Code that C calls, and code of backward, reads values as any other: they are guarded."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.graph_capture.python_state.moments import beside_eager, is_refused_for, planned
from tests.graph_capture.python_state.places import Place


class Holder:
    """What models below read `value` of, in one way or another."""

    def __init__(self, value: float) -> None:
        self.value = value

    def method(self) -> float:
        return self.value

    @property
    def computed(self) -> float:
        return self.value

    def __getattr__(self, name: str) -> float:
        if name == "asked":
            return self.value
        raise AttributeError(name)

    def __len__(self) -> int:
        return int(self.value)

    def __getitem__(self, index: int) -> float:
        return self.value + index

    def __iter__(self) -> Iterator[float]:
        yield self.value

    def __lt__(self, other: Holder) -> bool:
        return self.value < other.value


class Scaled(torch.autograd.Function):
    """Reads a value in backward alone."""

    held: ClassVar[Holder]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * Scaled.held.method()


def with_a_hook(held: Holder, x: Tensor) -> Tensor:
    y = x * 1.0
    y.register_hook(lambda grad: grad * held.method())
    return y


def with_a_hook_of_a_node(held: Holder, x: Tensor) -> Tensor:
    y = x * 1.0
    node: Any = y.grad_fn
    node.register_hook(lambda grads, _: (grads[0] * held.method(), *grads[1:]))
    return y


apply_scaled: Callable[[Tensor], Any] = Scaled.apply


def in_backward(held: Holder, x: Tensor) -> Any:
    Scaled.held = held
    return apply_scaled(x)


def recomputed(held: Holder, x: Tensor) -> Tensor:
    return checkpoint(lambda y: y * held.method(), x, use_reentrant=False)


def sorted_by(held: Holder) -> float:
    return sorted([Holder(1.5), held])[0].method()


READ: dict[str, Callable[[Holder, Tensor], Tensor]] = {
    "partial": lambda it, x: x * functools.partial(Holder.method, it)(),
    "map": lambda it, x: x * sum(map(Holder.method, [it, it])),
    "key of sorted": lambda it, x: x * sorted([it], key=Holder.method)[0].value,
    "compared by sorted": lambda it, x: x * sorted_by(it),
    "attrgetter": lambda it, x: x * operator.attrgetter("computed")(it),
    "methodcaller": lambda it, x: x * operator.methodcaller("method")(it),
    "property": lambda it, x: x * it.computed,
    "getattr of a class": lambda it, x: x * it.asked,
    "length": lambda it, x: x * len(it),
    "items": lambda it, x: x * it[1],
    "iteration": lambda it, x: x * sum(it),
    "comprehension": lambda it, x: x * max([one.method() for one in [it]]),
    "generator": lambda it, x: x * sum(one.method() for one in [it]),
    "a custom backward": in_backward,
    "a hook of a tensor": with_a_hook,
    "a hook of a node": with_a_hook_of_a_node,
    "checkpoint": recomputed,
}


class Reading(nn.Module):
    def __init__(self, read: Callable[[Holder, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held, self.read = Holder(2.0), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.held, self.linear(x)).square()


@pytest.mark.parametrize("kind", READ)
def test_what_is_read_through_c_or_in_backward_is_guarded(kind: str) -> None:
    model = Reading(READ[kind])
    place = Place(model, lambda _: None)
    fast = planned(place)
    assert beside_eager(place, fast) == "exact"
    model.held.value = 1.0
    assert is_refused_for("held.value", place, fast)
    model.held.value = 2.0
    assert beside_eager(place, fast) == "exact"
