"""Kinds of state, times where they live, times when they change: exact, planned anew, or refused.

The quick tests try each place at each moment with a few kinds; those marked slow try all kinds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from tests.graph_capture.python_state.kinds import IN_PLACE, KINDS
from tests.graph_capture.python_state.moments import (
    House,
    before_backward,
    before_rewriting,
    beside_eager,
    inside_forward,
    of_a_cache,
    planned,
)
from tests.graph_capture.python_state.places import (
    PLACES,
    Place,
    in_an_attribute,
    in_the_closure_of_a_loss,
)
from tests.threads import torch_threads

QUICK = (0, 13)
slow = pytest.mark.slow
shifts = pytest.mark.parametrize(
    "shift", [i if i in QUICK else pytest.param(i, marks=slow) for i in range(len(KINDS))]
)
DIAGONAL = list(zip(PLACES, KINDS, strict=False))
"""Each place with a kind of its own."""
CROSS = list(itertools.product(PLACES, KINDS))


def pairs(quick: list[tuple[str, str]], every: int = 1) -> pytest.MarkDecorator:
    """These pairs of a place and a kind; of all others, each so many marked slow."""
    others = [pytest.param(*pair, marks=slow) for pair in CROSS[::every] if pair not in quick]
    return pytest.mark.parametrize(("where", "kind"), [*quick, *others])


def made(where: str, kind: str) -> tuple[Place, object, object]:
    before, after = KINDS[kind]()
    return PLACES[where][0](before), before, after


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@shifts
def test_between_steps_it_is_refused_by_name_and_may_be_put_back(shift: int) -> None:
    house = House(shift)
    fast = planned(house.place)
    for where, change, undo in house.changes():
        change()
        said = beside_eager(house.place, fast)
        assert said.startswith("refused: StateChangedError"), where
        assert PLACES[where][1] in said, where
        assert "capture and solve again" in said
        undo()
        assert beside_eager(house.place, fast) == "exact", where


@shifts
def test_between_forward_and_backward_it_is_as_in_eager(shift: int) -> None:
    house = House(shift)
    fast = planned(house.place)
    for where, change, undo in house.changes():
        assert before_backward(house.place, fast, change, undo) == "exact", where


@pairs(DIAGONAL[::3], every=5)
def test_a_cache_plans_anew(where: str, kind: str) -> None:
    place, _, after = made(where, kind)
    assert of_a_cache(place, lambda: place.put(after)) == "planned anew"


@pairs(DIAGONAL[1::3], every=5)
def test_between_capture_and_rewriting_it_is_exact(where: str, kind: str) -> None:
    place, _, after = made(where, kind)
    assert before_rewriting(place, lambda: place.put(after)) == "exact"


@pairs(DIAGONAL)
def test_inside_forward_it_is_refused_or_set_by_each_step(where: str, kind: str) -> None:
    place, before, after = made(where, kind)
    said = inside_forward(place, lambda: place.put(after), lambda: place.put(before))
    assert said == "exact" or said.startswith("refused: CaptureError: "), said


@pytest.mark.parametrize("kind", IN_PLACE)
@pytest.mark.parametrize("make", [in_an_attribute, in_the_closure_of_a_loss])
def test_a_change_in_place_is_refused_or_seen(make: object, kind: str) -> None:
    value, change = IN_PLACE[kind]
    held = value()
    place = make(held)  # type: ignore[operator]
    fast = planned(place)
    assert beside_eager(place, fast) == "exact"
    change(held)
    said = beside_eager(place, fast)
    if kind == "tensor":
        assert said == "exact"
    else:
        assert said.startswith("refused: StateChangedError")


def test_a_tensor_written_before_backward_is_refused() -> None:
    held = torch.tensor(1.5)
    place = in_an_attribute(held)
    said = beside_eager(place, planned(place), lambda: held.add_(1.0))
    assert "it was changed between forward and backward" in said
