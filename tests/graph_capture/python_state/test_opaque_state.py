"""State that no attribute shows: iterators, generators of numbers, and what code asks for."""

from __future__ import annotations

import contextvars
import itertools
import os
import random
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import CaptureError, StateChangedError
from remat.graph_capture.python_state.state_guards import PythonState
from tests.graph_capture.python_state.moments import X, planned
from tests.graph_capture.python_state.places import Asking, Place, Reader


def numbers() -> Any:
    i = 0.0
    while True:
        i += 1
        yield i


TAKEN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "counter": (itertools.count, next),
    "generator": (numbers, next),
    "list": (lambda: iter([1.0, 2.0, 3.0]), next),
    "cycle": (lambda: itertools.cycle([1.0, 2.0]), next),
    "repeat": (lambda: itertools.repeat(2.0, 3), next),
    "enumerate": (lambda: enumerate([1.0, 2.0]), lambda it: next(it)[1]),
    "zip": (lambda: zip([1.0, 2.0], strict=True), lambda it: next(it)[0]),
    "random": (lambda: random.Random(0), lambda it: it.random()),
    "its method": (lambda: random.Random(0).random, lambda it: it()),
    "numpy": (lambda: np.random.default_rng(0), lambda it: it.random()),
    "older numpy": (lambda: np.random.RandomState(0), lambda it: it.rand()),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_what_forward_takes_from_them_is_refused_without_a_check_too(kind: str) -> None:
    make, take = TAKEN[kind]
    with pytest.raises(
        CaptureError, match=r"take held outside forward and pass it in.*takes its next item"
    ):
        planned(Place(Asking(make(), take), lambda _: None))


def test_what_repeats_for_ever_gives_the_same_at_every_step() -> None:
    planned(Place(Asking(itertools.repeat(2.0), next), lambda _: None))


@pytest.mark.parametrize("kind", ["random", "its method", "numpy", "older numpy"])
def test_a_refused_capture_leaves_generators_where_they_were(kind: str) -> None:
    make, take = TAKEN[kind]
    held = make()
    with pytest.raises(CaptureError):
        planned(Place(Asking(held, take), lambda _: None))
    assert take(held) == take(make())


def test_a_generator_may_be_drawn_from_between_steps() -> None:
    held = random.Random(0)
    model = Asking(held, lambda it: 2.0 if it.getstate() is None else 1.0)
    fast = planned(Place(model, lambda _: None))
    held.random()
    assert torch.equal(fast(X), model(X))


def test_the_way_out_works() -> None:
    class Given(Reader):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * scale

    model, held = Given(), random.Random(0)
    fast = remat.rematerialize(model, budget="100%", solver="store_all", check=False)
    for _ in range(2):
        scale = torch.tensor(held.random())
        assert torch.equal(fast(X, scale), model(X, scale))
    assert len(remat.plans(fast)) == 1


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE", default=1.0)
NAME = "REMAT_TESTS_FACTOR"


def asked() -> dict[str, tuple[Any, Callable[[Any], Any], Callable[[], Any]]]:
    own, config = threading.local(), types.SimpleNamespace(factor=1.0)
    own.factor = 1.0

    class Config:
        factor = 1.0

    object_ = Config()
    table = {"factor": 1.0}
    return {
        "context variable": (VARIABLE, lambda it: it.get(), lambda: VARIABLE.set(2.0)),
        "a thread's own": (own, lambda it: it.factor, lambda: setattr(own, "factor", 2.0)),
        "weak reference": (
            weakref.ref(object_), lambda it: it().factor, lambda: setattr(object_, "factor", 2.0),
        ),
        "environment": (
            None,
            lambda _: float(os.environ.get("REMAT_TESTS_FACTOR", "1")),
            lambda: os.environ.update({NAME: "2"}),
        ),
        "method of a dictionary": (
            table.get, lambda it: it("factor"), lambda: table.update(factor=2.0),
        ),
        "namespace": (config, lambda it: it.factor, lambda: setattr(config, "factor", 2.0)),
    }  # fmt: skip


@pytest.mark.parametrize("kind", asked())
def test_what_code_asks_for_is_guarded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    held, ask, change = asked()[kind]
    model = Asking(held, ask)
    kept = contextvars.copy_context()
    fast = planned(Place(model, lambda _: None))

    def changed() -> None:
        assert torch.equal(fast(X), model(X))
        change()
        with pytest.raises(StateChangedError, match="put it back, or capture and solve again"):
            fast(X)

    kept.run(changed)
    monkeypatch.delenv(NAME, raising=False)


class AsksTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        factor = 3.0 if torch.is_anomaly_enabled() else 2.0
        return self.linear(x) * factor


def test_a_setting_of_torch_that_forward_asks_for_is_compared() -> None:
    state = PythonState(AsksTorch())
    assert state.first_change() is None
    with torch.autograd.set_detect_anomaly(True):
        change = state.first_change()
    assert change is not None
    assert "torch.is_anomaly_enabled()" in change.text
    assert state.first_change() is None


def test_other_code_in_a_function_is_noticed() -> None:
    """As where a notebook loads an edited file anew (`%autoreload 2`)."""

    def factor() -> float:
        return 2.0

    class Calls(AsksTorch):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * factor()

    state = PythonState(Calls())
    before = factor.__code__
    factor.__code__ = (lambda: 3.0).__code__
    change = state.first_change()
    assert change is not None
    assert "the code of" in change.text
    factor.__code__ = before
    assert state.first_change() is None
