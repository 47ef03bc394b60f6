"""Registries of libraries, which a first call adds to, are no state of the user's."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat.graph_capture.errors import CaptureError, StateChangedError
from tests.graph_capture.python_state.moments import X, planned
from tests.graph_capture.python_state.places import Place, Reader

SOURCE = """
import threading

import torch.fx

LOCAL = threading.local()
MASKS = {}

class Using:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        if not hasattr(LOCAL, "stack"):
            LOCAL.stack = []
        LOCAL.stack.append(self.name)

    def __exit__(self, *_):
        LOCAL.stack.pop()

def used():
    return list(LOCAL.stack) if hasattr(LOCAL, "stack") else []

@torch.fx.wrap
def doubled(x):
    return x * FACTOR

def masked(x):
    if "mask" not in MASKS:
        MASKS["mask"] = x.new_ones(x.shape)
    return x * MASKS["mask"]
class Backend:
    def scale(self, x):
        return x * FACTOR

FACTOR = 2.0
BACKENDS = {}

def backend_of(x):
    if type(x) not in BACKENDS:
        BACKENDS[type(x)] = Backend()
    return BACKENDS[type(x)]
"""


@pytest.fixture
def library() -> Iterator[Any]:
    """A module that looks as if it were installed."""
    module = types.ModuleType("tests_installed_library")
    module.__file__ = "/somewhere/site-packages/tests_installed_library.py"
    exec(SOURCE, vars(module))
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


class Calling(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.linear, self.library = nn.Linear(4, 4), library

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.library.backend_of(y).scale(y)


def test_what_a_library_registers_at_its_first_call_is_no_change(library: Any) -> None:
    model = Calling(library)
    fast = planned(Place(model, lambda _: None))
    assert library.BACKENDS == {}
    assert torch.equal(fast(X), model(X))
    assert list(library.BACKENDS) == [Tensor]
    assert torch.equal(fast(X), model(X))


def test_what_a_library_has_registered_before_is_compared(library: Any) -> None:
    model = Calling(library)
    model(X)
    fast = planned(Place(model, lambda _: None))
    library.FACTOR = 3.0
    with pytest.raises(StateChangedError, match="FACTOR"):
        fast(X)
    library.FACTOR = 2.0
    library.BACKENDS[Tensor] = object()
    with pytest.raises(StateChangedError, match="BACKENDS"):
        fast(X)


def test_a_dictionary_of_the_users_own_is_state(library: Any) -> None:
    class Keeping(Reader):
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[str, Any] = {}

        def read(self) -> Any:
            self.kept.setdefault("it", library.Backend())
            return 1.0

    with pytest.raises(CaptureError, match="kept"):
        planned(Place(Keeping(), lambda _: None))


class Within(nn.Module):
    """Reads what a library holds while it runs. No walk sees how the library comes by that."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.linear, self.library, self.entered = nn.Linear(4, 4), library, "Using"
        self.used = library.used

    def forward(self, x: Tensor) -> Tensor:
        with getattr(self.library, self.entered)("scale"):
            return self.linear(x) * (1 + len(self.used()))


def test_a_library_is_left_as_a_call_leaves_it(library: Any) -> None:
    """What it holds only while forward runs is not put back into it."""
    with contextlib.suppress(CaptureError):
        planned(Place(Within(library), lambda _: None))
    assert library.used() == []


class Masking(nn.Module):
    """Calls a function of a library that keeps a tensor."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.linear, self.masked = nn.Linear(4, 4), library.masked

    def forward(self, x: Tensor) -> Tensor:
        return self.masked(self.linear(x))


def test_tensors_of_a_trace_do_not_stay_in_a_library(library: Any) -> None:
    model = Masking(library)
    with contextlib.suppress(CaptureError):
        planned(Place(model, lambda _: None))
    assert library.MASKS == {}
    assert torch.equal(model(X), model.linear(X))


class Doubling(nn.Module):
    """Calls a function that fx has a stand-in for while it traces."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.linear, self.library = nn.Linear(4, 4), library

    def forward(self, x: Tensor) -> Tensor:
        return self.library.doubled(self.linear(x))


@pytest.mark.parametrize("file", ["/somewhere/site-packages/library.py", "/home/own/library.py"])
def test_what_fx_puts_in_the_place_of_a_function_is_no_change(library: Any, file: str) -> None:
    library.__file__, own = file, library.doubled
    model = Doubling(library)
    fast = planned(Place(model, lambda _: None))
    assert library.doubled is own
    assert torch.equal(fast(X), model(X))
    library.FACTOR = 3.0
    with pytest.raises(StateChangedError, match="FACTOR"):
        fast(X)
