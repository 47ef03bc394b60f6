"""Python's state that forward and the loss read: where it lives, what it is, when it changes."""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from remat.graph_capture.python_state.watch import PythonState

WIDTH = 4
FACTOR: Any = 1.0
"""A global that `Global` reads."""
there = types.ModuleType("tests_module_of_settings")
sys.modules[there.__name__] = there
there.FACTOR = 1.0  # type: ignore[attr-defined]


class Mode(enum.Enum):
    PLAIN = 1.0
    DOUBLE = 2.0


def as_number(value: Any) -> float:
    """A factor from a value of any of the kinds below."""
    if callable(value):
        return float(value())
    if isinstance(value, enum.Enum):
        return float(value.value)
    if isinstance(value, dict):
        return float(value["factor"])
    if isinstance(value, (list, tuple, deque)):
        return float(sum(value))
    if isinstance(value, (set, frozenset)):
        return float(len(value))
    if isinstance(value, str):
        return float(len(value))
    if isinstance(value, np.ndarray):
        return float(value.sum())
    return float(value is not None) if value is None else float(value)


def one() -> float:
    return 1.0


def two() -> float:
    return 2.0


KINDS: dict[str, tuple[Any, Any]] = {
    "float": (1.0, 2.0),
    "int": (1, 2),
    "bool": (True, False),
    "bool for int": (1, True),
    "text": ("a", "ab"),
    "none": (None, 1.0),
    "enum": (Mode.PLAIN, Mode.DOUBLE),
    "list": ([1.0, 2.0], [1.0, 3.0]),
    "tuple": ((1.0, 2.0), (1.0, 3.0)),
    "dict": ({"factor": 1.0}, {"factor": 2.0}),
    "set": ({1}, {1, 2}),
    "deque": (deque([1.0]), deque([2.0])),
    "array": (np.ones(2), np.full(2, 2.0)),
    "function": (one, two),
    "dtype": (torch.float32, torch.float64),
}


class Place(NamedTuple):
    """A model that reads a value, and how to set it."""

    model: nn.Module
    put: Callable[[Any], None]
    loss_fn: Callable[..., Any] | None = None


class Reader(nn.Module):
    """A base of the models below."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def read(self) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * as_number(self.read())


def in_an_attribute(value: Any) -> Place:
    class Attribute(Reader):
        def read(self) -> Any:
            return self.value

    model = Attribute()
    model.value = value
    return Place(model, lambda new: setattr(model, "value", new))


def in_a_config(value: Any) -> Place:
    class Config(Reader):
        def read(self) -> Any:
            return self.config.inner.value

    model = Config()
    model.config = types.SimpleNamespace(inner=_Settings())
    model.config.inner.value = value
    return Place(model, lambda new: setattr(model.config.inner, "value", new))


class _Settings:
    value: Any


def in_a_list(value: Any) -> Place:
    class Listed(Reader):
        def read(self) -> Any:
            return self.values[1]

    model = Listed()
    model.values = [None, value]
    return Place(model, lambda new: model.values.__setitem__(1, new))


def in_a_dictionary(value: Any) -> Place:
    class Mapped(Reader):
        def read(self) -> Any:
            return self.values["it"]

    model = Mapped()
    model.values = {"it": value}
    return Place(model, lambda new: model.values.update(it=new))


def in_a_closure(value: Any) -> Place:
    held = value

    class Closed(Reader):
        def read(self) -> Any:
            return held

    def put(new: Any) -> None:
        nonlocal held
        held = new

    return Place(Closed(), put)


def in_a_global(value: Any) -> Place:
    class Global(Reader):
        def read(self) -> Any:
            return FACTOR

    def put(new: Any) -> None:
        globals()["FACTOR"] = new

    put(value)
    return Place(Global(), put)


def in_another_module(value: Any) -> Place:
    class Elsewhere(Reader):
        def read(self) -> Any:
            return there.FACTOR  # type: ignore[attr-defined]

    there.FACTOR = value  # type: ignore[attr-defined]
    return Place(Elsewhere(), lambda new: setattr(there, "FACTOR", new))


def in_a_class(value: Any) -> Place:
    class OfClass(Reader):
        def read(self) -> Any:
            return type(self).shared

    OfClass.shared = value
    return Place(OfClass(), lambda new: setattr(OfClass, "shared", new))


def over_a_class(value: Any) -> Place:
    """An instance's own value hides that of its class."""

    class Hidden(Reader):
        def read(self) -> Any:
            return self.shared

    Hidden.shared = value
    model = Hidden()
    return Place(model, lambda new: setattr(model, "shared", new))


def in_a_property(value: Any) -> Place:
    class Computed(Reader):
        def read(self) -> Any:
            return self.computed

        @property
        def computed(self) -> Any:
            return self.hidden

    model = Computed()
    model.hidden = value
    return Place(model, lambda new: setattr(model, "hidden", new))


def in_a_default(value: Any) -> Place:
    class Defaulted(Reader):
        def read(self) -> Any:
            return self.given()

        def given(self, factor: Any = value) -> Any:
            return factor

    def put(new: Any) -> None:
        Defaulted.given.__defaults__ = (new,)

    return Place(Defaulted(), put)


def in_a_partial(value: Any) -> Place:
    held = {"it": value}

    def read(source: dict[str, Any]) -> Any:
        return source["it"]

    class Partial(Reader):
        def read(self) -> Any:
            return self.bound()

    model = Partial()
    model.bound = functools.partial(read, held)
    return Place(model, lambda new: held.update(it=new))


def by_a_name_in_text(value: Any) -> Place:
    class ByName(Reader):
        def read(self) -> Any:
            return getattr(self, "by_name")  # noqa: B009

    model = ByName()
    model.by_name = value
    return Place(model, lambda new: setattr(model, "by_name", new))


def in_a_loss(value: Any) -> Place:
    class Loss:
        def __init__(self) -> None:
            self.value = value

        def __call__(self, output: Tensor) -> Tensor:
            return output.sum() * as_number(self.value)

    loss_fn = Loss()
    return Place(nn.Linear(WIDTH, WIDTH), lambda new: setattr(loss_fn, "value", new), loss_fn)


PLACES = {
    place.__name__: place
    for place in (
        in_an_attribute, in_a_config, in_a_list, in_a_dictionary, in_a_closure, in_a_global,
        in_another_module, in_a_class, over_a_class, in_a_property, in_a_default, in_a_partial,
        by_a_name_in_text, in_a_loss,
    )
}  # fmt: skip


def changed(state: PythonState) -> bool:
    return state.first_change() is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", PLACES)
def test_a_change_is_noticed_wherever_it_is_read(where: str, kind: str) -> None:
    before, after = KINDS[kind]
    place = PLACES[where](before)
    state = PythonState(place.model, place.loss_fn)
    assert not changed(state)
    place.put(after)
    assert changed(state)
    place.put(before)
    assert not changed(state) or where == "over_a_class"


IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1.0, 2.0], lambda it: it.__setitem__(0, 3.0)),
    "dict": (lambda: {"factor": 1.0}, lambda it: it.update(factor=2.0)),
    "set": (lambda: {1}, lambda it: it.add(2)),
    "deque": (lambda: deque([1.0]), lambda it: it.append(2.0)),
    "array": (lambda: np.ones(2), lambda it: it.__setitem__(0, 5.0)),
}


@pytest.mark.parametrize("kind", IN_PLACE)
@pytest.mark.parametrize("where", PLACES)
def test_a_change_in_place_is_noticed_and_can_be_put_back(where: str, kind: str) -> None:
    make, change = IN_PLACE[kind]
    held = make()
    place = PLACES[where](held)
    state = PythonState(place.model, place.loss_fn)
    change(held)
    assert changed(state)
    state.restore()
    assert not changed(state)
    assert as_number(held) == as_number(make())


def test_another_object_of_the_same_value_is_no_change() -> None:
    place = in_an_attribute(float("1.5"))
    state = PythonState(place.model)
    place.put(float("1.5"))
    assert not changed(state)
    place.put(float("nan"))
    assert changed(state)


def test_nan_is_nan_and_minus_zero_is_not_zero() -> None:
    for value, same in ((float("nan"), True), (0.0, False)):
        place = in_an_attribute(value)
        state = PythonState(place.model)
        place.put(float("nan") if same else -0.0)
        assert changed(state) is not same


def test_what_no_code_reads_may_change() -> None:
    place = in_an_attribute(1.0)
    state = PythonState(place.model)
    place.model.epoch = 3
    assert not changed(state)
    place.model.epoch = 4
    assert not changed(state)


def test_a_method_that_is_replaced_is_a_change() -> None:
    place = in_an_attribute(1.0)
    state = PythonState(place.model)
    place.model.read = lambda: 2.0
    assert state.first_change() is not None
    del place.model.read
    assert not changed(state)


def test_a_cached_function_is_emptied_of_what_a_trace_put_there() -> None:
    @functools.cache
    def table(n: int) -> list[int]:
        return [n]

    class Cached(Reader):
        def read(self) -> Any:
            return table(3)

    state = PythonState(Cached())
    table(3)
    state.restore()
    assert table.cache_info().currsize == 0


def test_a_message_names_the_place_and_both_values() -> None:
    place = in_a_config(1.0)
    state = PythonState(place.model)
    place.put(2.0)
    change = state.first_change()
    assert change is not None
    assert (change.text, change.before, change.now) == ("config.inner.value", 1.0, 2.0)
