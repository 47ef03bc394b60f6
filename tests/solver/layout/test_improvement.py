"""Guided ejection on boxes small enough to follow by hand, and on rectangles cut into pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.schedules.layout import Buffers
from remat.solver.layout.boxes import Boxes
from remat.solver.layout.heuristics import MOST_PENALTY, greedy, guided_ejection
from tests.solver.layout.random_boxes import cut_rectangle, overlaps, some_buffers


@pytest.mark.parametrize(("rectangle", "seed"), [(0, 2), (6, 7)])
def test_it_finds_the_load_that_greedy_placements_miss(rectangle: int, seed: int) -> None:
    boxes = Boxes.of(cut_rectangle(rectangle, 25), 1)
    offsets, _ = greedy(boxes, boxes.load)
    assert boxes.top(offsets) > boxes.load
    found = guided_ejection(boxes, offsets, boxes.load, steps=600, seed=seed)
    assert found is not None
    assert boxes.top(found) == boxes.load
    assert not overlaps(boxes, found)
    again = guided_ejection(boxes, offsets, boxes.load, steps=600, seed=seed)
    assert again is not None
    assert found.tolist() == again.tolist()


@settings(max_examples=60, deadline=None)
@given(some_buffers(), st.integers(0, 1 << 30), st.sampled_from([1.0, 1.2, 2.0]))
def test_what_it_finds_lies_apart_within_the_capacity(
    buffers: Buffers, seed: int, part: float
) -> None:
    boxes = Boxes.of(buffers, 64)
    capacity = int(part * boxes.load)
    nowhere = np.full(len(boxes), capacity, np.int64)
    found = guided_ejection(boxes, nowhere, capacity, steps=100, seed=seed)
    if found is not None:
        assert boxes.top(found) <= capacity
        assert (found >= 0).all()
        assert not overlaps(boxes, found)


def test_what_waits_ejects_the_least_area() -> None:
    """The last fits nowhere: it takes the place of the short one, which fits above the gap."""
    boxes = Boxes.of(Buffers.of_arrays([2, 2, 2], [0, 0, 1], [4, 1, 4]), 1)
    found = guided_ejection(boxes, np.array([0, 2, 3]), 4, steps=1, seed=0)
    assert found is not None
    assert found.tolist() == [0, 2, 2]
    boxes = Boxes.of(Buffers.of_arrays([3, 1, 2, 1], [0, 0, 1, 1], [1, 4, 4, 4]), 1)
    start = np.array([1, 0, 4, 1])
    assert guided_ejection(boxes, start, 4, steps=0, seed=0) is None
    found = guided_ejection(boxes, start, 4, steps=1, seed=0)
    assert found is not None
    assert found.tolist() == [1, 0, 2, 1]


def test_what_is_larger_than_the_capacity_is_not_tried() -> None:
    boxes = Boxes.of(Buffers.of_arrays([5], [0], [1]), 1)
    assert guided_ejection(boxes, np.array([0]), 4, steps=1, seed=0) is None


def test_below_the_load_it_ends_after_its_steps_with_penalties_at_their_most() -> None:
    boxes = Boxes.of(Buffers.of_arrays([2, 2, 2], [0, 0, 0], [1, 1, 1]), 1)
    assert MOST_PENALTY < 1.3**100
    assert guided_ejection(boxes, np.array([0, 2, 4]), 4, steps=400, seed=0) is None
