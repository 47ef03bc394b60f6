"""What torch cannot trace is refused in words that say what to do, and nothing is left behind."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import dlpack

import remat
from remat.graph_capture.errors import CaptureError


class Net(nn.Module):
    """Computes as a function of it and its batch says."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.computed = nn.Linear(8, 8), nn.Linear(8, 8), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.computed(self, x).sum()


class Own(Tensor):
    """A class of somebody's own."""


class Halved(saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(lambda t: t.bfloat16(), lambda t: t.float())


def body(self: Any, x: Tensor) -> Tensor:
    return self.last(torch.tanh(self.first(x)))


def by_threads(self: Any, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(2) as pool:
        first, last = pool.map(lambda layer: layer(x), (self.first, self.last))
    return first * last


def packed(self: Any, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        return body(self, x)


def packed_by_a_class(self: Any, x: Tensor) -> Tensor:
    with Halved():
        return body(self, x)


def on_the_host(self: Any, x: Tensor) -> Tensor:
    with save_on_cpu():
        return body(self, x)


def nested(self: Any, x: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
    return self.first(rows).values()


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "numpy": (lambda m, x: body(m, x) * float(np.asarray(x).mean()), "with torch, .*to NumPy"),
    "a text": (
        lambda m, x: body(m, x) * len(f"{x.mean():.3f}"),
        "that forward returns.*into a text",
    ),
    "an address": (lambda m, x: body(m, x + 0 * x.data_ptr()), "(?s)custom_op.*data_ptr"),
    "another library": (lambda m, x: body(m, dlpack.from_dlpack(x)), "DLPack.*custom_op"),
    "a copy": (lambda m, x: copy.deepcopy(m.first)(x), "outside forward.*deepcopy"),
    "threads": (by_threads, "in one thread.*another thread"),
    "lists of rows": (nested, "pad .*nested tensor"),
    "packing": (packed, r"leave out .*pack what it saves \(.*test_what_failed.py:\d+\)"),
    "packing by a class": (packed_by_a_class, r"pack what it saves \(.*:\d+\)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_refusal_says_what_to_do_instead(what: str) -> None:
    forward, says = REFUSED[what]
    model, x = Net(forward), torch.randn(4, 8)
    before = model(x)
    enter = saved_tensors_hooks.__enter__
    with pytest.raises(CaptureError, match=says):
        remat.capture(model, (x,))
    assert torch.equal(model(x), before)
    assert saved_tensors_hooks.__enter__ is enter


def test_what_torch_itself_packs_is_unpacked_to_the_same_bits() -> None:
    model, x = Net(on_the_host), torch.randn(4, 8)
    remat.rematerialize(model, (x,), budget="100%", solver="store_all")  # which checks all bits


def test_tensors_of_a_class_of_their_own_are_refused_by_name() -> None:
    model, x = Net(body), torch.randn(4, 8)
    with pytest.raises(CaptureError, match=r"as_subclass.*args\[0\] is a Own"):
        remat.capture(model, (x.as_subclass(Own),))
    remat.capture(model, (x.as_subclass(Own).as_subclass(Tensor),))
    model.register_buffer("mask", torch.ones(8).as_subclass(Own))
    with pytest.raises(CaptureError, match=r"as_subclass.*buffer mask is a Own"):
        remat.capture(model, (x,))


@pytest.mark.parametrize("kind", [weakref.WeakKeyDictionary, dict])
def test_a_cache_keyed_by_modules_is_as_before_after_a_refusal(kind: type[Any]) -> None:
    cache = kind()

    def cached(self: Any, x: Tensor) -> Tensor:
        if self.first not in cache:
            cache[self.first] = torch.ones(8)
        return body(self, x) * cache[self.first]

    model, x = Net(cached), torch.randn(4, 8)
    with pytest.raises(CaptureError, match="call the model once on a batch first"):
        remat.rematerialize(model, (x,), budget="100%", solver="store_all")
    assert len(cache) == 0
    expected = model(x)
    fast = remat.rematerialize(model, (x,), budget="100%", solver="store_all")
    assert torch.equal(fast(x), expected)
