"""The loop that moves the target until the code fits, on schedules whose code is made up."""

from __future__ import annotations

from dataclasses import dataclass

from remat.compile.plan_search import fastest_within

LEAST_BYTES = 500
"""Below this no schedule is known."""


@dataclass(frozen=True)
class Made:
    """A schedule as large as its target, whose code takes more."""

    schedule_peak_bytes: int
    code_peak_bytes: int
    is_least: bool

    @property
    def time_us(self) -> float:
        return 2000.0 - self.schedule_peak_bytes


class Maker:
    """Makes one plan a target, and notes the targets."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.asked: list[int] = []
        self.made: dict[int, Made] = {}

    def __call__(self, target_bytes: int) -> Made:
        self.asked.append(target_bytes)
        peak_bytes = max(target_bytes, LEAST_BYTES)
        made = Made(peak_bytes, int(self.factor * peak_bytes), target_bytes < LEAST_BYTES)
        return self.made.setdefault(peak_bytes, made)


def test_a_target_whose_code_takes_too_much_is_lowered() -> None:
    maker = Maker(1.1)
    found = fastest_within(1000, maker, tries=6, is_enough=lambda _: True)
    assert found is not None
    assert 970 <= found.code_peak_bytes <= 1000
    assert maker.asked[0] == 1000
    assert maker.asked == sorted(maker.asked, reverse=True)
    assert fastest_within(1000, Maker(1.1), tries=1, is_enough=lambda _: True) is None


def test_a_target_whose_code_leaves_room_is_raised() -> None:
    maker = Maker(0.8)
    found = fastest_within(1000, maker, tries=6, is_enough=lambda made: made.code_peak_bytes >= 970)
    assert found is not None
    assert 970 <= found.code_peak_bytes <= 1000
    assert found.schedule_peak_bytes > 1000


def test_it_ends_where_the_least_schedule_comes_again() -> None:
    maker = Maker(3.0)
    assert fastest_within(1000, maker, tries=20, is_enough=lambda _: True) is None
    assert len(maker.asked) < 6


def test_it_ends_where_there_is_no_schedule() -> None:
    asked: list[int] = []
    assert fastest_within(1000, asked.append, tries=20, is_enough=lambda _: True) is None
    assert asked == [1000]
