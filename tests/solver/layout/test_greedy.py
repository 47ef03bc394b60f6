"""Greedy placements and annealing on boxes small enough to follow by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.graph_capture.graph import Ints
from remat.schedules.layout import Buffers
from remat.solver.layout import heuristics
from remat.solver.layout.boxes import Boxes
from remat.solver.layout.heuristics import (
    box_orders,
    greedy,
    insertion_annealing,
    place_in_order,
    stacked,
)
from tests.solver.layout.random_boxes import cut_rectangle, overlaps, random_buffers, some_buffers

HOLES = Boxes.of(Buffers.of_arrays([4, 1, 2, 1, 2], [0, 0, 0, 0, 1], [1, 2, 1, 2, 2]), 1)
"""In this order: at 0, 4, 5 and 7. At time 1 the first leaves 4 below, the third 2 between."""


@pytest.mark.parametrize(("is_best_fit", "offset"), [(False, 0), (True, 5)])
def test_first_fit_is_the_lowest_gap_and_best_fit_the_smallest(
    is_best_fit: bool, offset: int
) -> None:
    placed = place_in_order(HOLES, np.arange(5), is_best_fit=is_best_fit)
    assert placed is not None
    assert placed.tolist() == [0, 4, 5, 7, offset]


def test_what_fits_no_gap_goes_on_top() -> None:
    boxes = Boxes.of(Buffers.of_arrays([4, 1, 5], [0, 0, 1], [1, 2, 2]), 1)
    placed = place_in_order(boxes, np.arange(3))
    assert placed is not None
    assert placed.tolist() == [0, 4, 5]


def test_it_gives_up_at_the_ceiling() -> None:
    assert place_in_order(HOLES, np.arange(5), ceiling=8) is None
    assert place_in_order(HOLES, np.arange(5), ceiling=9) is not None


def test_what_is_given_stays() -> None:
    given_offsets = np.array([0, 4, 5, 9, 0])
    placed = place_in_order(HOLES, np.array([4, 2]), given=given_offsets)
    assert placed is not None
    assert placed.tolist() == [0, 4, 5, 9, 0]


@settings(max_examples=40, deadline=None)
@given(some_buffers())
def test_orders_hold_each_box_once(buffers: Buffers) -> None:
    boxes = Boxes.of(buffers, 64)
    found = box_orders(boxes)
    for name, order in found.items():
        assert sorted(order.tolist()) == list(range(len(boxes))), name
    assert len(found) == (20 if len(boxes) else 8)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 30))
def test_boxes_of_one_size_lie_without_a_hole_by_start_and_by_end(seed: int) -> None:
    buffers = random_buffers(random.Random(seed), 60, 1, 30)
    boxes = Boxes.of(buffers, 1)
    for name in ("size, start", "size, end"):
        placed = place_in_order(boxes, box_orders(boxes)[name])
        assert placed is not None
        assert boxes.top(placed) == boxes.load


def test_of_many_boxes_there_are_fewer_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = Boxes.of(cut_rectangle(0, 30), 1)
    placed: list[int] = []

    def counted(*args: Any, **options: Any) -> Ints | None:
        placed.append(1)
        return place_in_order(*args, **options)

    monkeypatch.setattr(heuristics, "place_in_order", counted)
    counts: list[int] = []
    for work in (100_000, 30 * 10, 0):
        monkeypatch.setattr(heuristics, "GREEDY_WORK", work)
        placed.clear()
        greedy(boxes, boxes.load)
        counts.append(len(placed))
    assert counts == [40, 10, 6]


@pytest.mark.parametrize(("seed", "n"), [(0, 20), (0, 30), (6, 30)])
def test_annealing_lowers_what_greedy_placements_leave_high(seed: int, n: int) -> None:
    boxes = Boxes.of(cut_rectangle(seed, n), 1)
    offsets, _ = greedy(boxes, boxes.load)
    cooled = insertion_annealing(boxes, offsets, boxes.load, steps=300, hottest=40.0, seed=0)
    assert boxes.load <= boxes.top(cooled) < boxes.top(offsets)
    assert not overlaps(boxes, cooled)
    again = insertion_annealing(boxes, offsets, boxes.load, steps=300, hottest=40.0, seed=0)
    assert cooled.tolist() == again.tolist()


def test_annealing_knows_the_height_at_each_place() -> None:
    """Taken out and put anywhere, a box makes the stack as high as it was told, or as all else."""
    boxes = Boxes.of(cut_rectangle(3, 12), 1)
    columns = boxes.size, boxes.start, boxes.end
    order, levels, heights = np.arange(1, 12), np.empty(12, np.int64), np.zeros(12, np.int64)
    above = levels.copy()
    without = stacked(*columns, order, 0, levels, heights)
    stacked(*columns, order[::-1].copy(), 0, above, heights)
    for at in range(12):
        whole = np.insert(order, at, 0)
        top = stacked(*columns, whole, 0, np.empty(13, np.int64), heights)
        assert top == max(without, levels[at] + above[::-1][at] + boxes.size[0])
