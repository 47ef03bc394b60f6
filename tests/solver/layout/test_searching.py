"""Searches within a capacity: what each tries, and how much of it."""

from __future__ import annotations

import pytest

from remat.solver.layout import heuristics, placing
from remat.solver.layout.boxes import Boxes
from remat.solver.layout.heuristics import box_orders
from remat.solver.layout.placing import LEAST_STARTS, STARTS, Searches
from tests.solver.layout.random_boxes import cut_rectangle, overlaps


@pytest.mark.parametrize(("seed", "n"), [(0, 20), (0, 30), (6, 30)])
def test_ejections_find_the_load_from_one_start_or_another(seed: int, n: int) -> None:
    boxes = Boxes.of(cut_rectangle(seed, n), 1)
    found = Searches(boxes).within(boxes.load, is_relaxed=False)
    assert found is not None
    assert found.by.startswith("guided ejection, ")
    assert boxes.top(found.offsets) == boxes.load
    assert not overlaps(boxes, found.offsets)


def test_below_the_load_nothing_is_found() -> None:
    boxes = Boxes.of(cut_rectangle(0, 20), 1)
    assert Searches(boxes).within(boxes.load - 1, is_relaxed=False) is None
    assert Searches(boxes).within(boxes.load - 1, is_relaxed=True) is None


def test_starts_are_orders() -> None:
    orders = box_orders(Boxes.of(cut_rectangle(0, 20), 1))
    assert set(STARTS) <= set(orders)
    assert len(set(STARTS)) == len(STARTS)


@pytest.mark.parametrize(
    ("work", "is_relaxed", "starts"),
    [(100_000, False, len(STARTS)), (30 * 7, False, 7), (0, False, LEAST_STARTS),
     (100_000, True, LEAST_STARTS)],
)  # fmt: skip
def test_of_many_boxes_or_above_the_goal_there_are_fewer_starts(
    monkeypatch: pytest.MonkeyPatch, work: int, is_relaxed: bool, starts: int
) -> None:
    seeds: list[int] = []

    def never(*_args: object, steps: int, seed: int) -> None:
        del steps
        seeds.append(seed)

    monkeypatch.setattr(placing, "START_WORK", work)
    monkeypatch.setattr(placing, "DIVE_WORK", 0)
    monkeypatch.setattr(heuristics, "guided_ejection", never)
    boxes = Boxes.of(cut_rectangle(0, 30), 1)
    assert Searches(boxes).within(boxes.load, is_relaxed=is_relaxed) is None
    assert seeds == list(range(starts))
