"""Python's state that forward and the loss read: where it lives, what it is, when it changes."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from remat.graph_capture.python_state.state_guards import PythonState
from tests.graph_capture.python_state.kinds import IN_PLACE, KINDS, factor_of
from tests.graph_capture.python_state.places import PLACES, Reader, in_a_config, in_an_attribute
from tests.rows import each_nth


def changed(state: PythonState) -> bool:
    return state.first_change() is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", each_nth(3, PLACES))
def test_a_change_is_noticed_wherever_it_is_read(where: str, kind: str) -> None:
    before, after = KINDS[kind]()
    place = PLACES[where][0](before)
    state = PythonState(place.model, place.loss_fn)
    assert not changed(state)
    place.put(after)
    assert changed(state)
    place.put(before)
    assert not changed(state)


@pytest.mark.parametrize("kind", sorted(IN_PLACE.keys() - {"tensor"}))
@pytest.mark.parametrize("where", PLACES)
def test_a_change_in_place_is_noticed_and_can_be_put_back(where: str, kind: str) -> None:
    make, change = IN_PLACE[kind]
    held = make()
    place = PLACES[where][0](held)
    state = PythonState(place.model, place.loss_fn)
    change(held)
    assert changed(state)
    if kind == "mapping proxy":
        return  # what is behind it cannot be written through it
    state.restore()
    assert not changed(state)
    assert factor_of(held) == factor_of(make())


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
