"""What others take of the time of a thread is told apart from what it waits for."""

from __future__ import annotations

import time

import pytest

from remat.graph_capture.devices import meter
from remat.graph_capture.devices.meter import PASSES, LoadAwareTimer, median_of


@pytest.mark.parametrize(
    ("by_others", "by_itself", "is_told_apart", "is_away"),
    [(0, 0, False, False), (0, 3, False, False), (2, 0, True, True), (2, 3, False, True)],
)
def test_time_of_others_is_taken_off_where_the_thread_never_waited(
    monkeypatch: pytest.MonkeyPatch, by_others: int, by_itself: int, is_told_apart: bool,
    is_away: bool,
) -> None:  # fmt: skip
    """The thread sleeps for a while, which here stands for others that have the core."""
    switches = [(5, 5), *[(5 + by_others, 5 + by_itself)] * 2]
    monkeypatch.setattr(meter, "_switches", lambda: switches.pop(0))
    watch = LoadAwareTimer()
    time.sleep(0.05)
    taken_us, away = watch.taken_us, watch.away
    assert (taken_us < 5e4) is is_told_apart
    assert (away > 0.5) is is_away


def test_a_wait_of_its_own_accord_is_time_that_it_takes() -> None:
    watch = LoadAwareTimer()
    time.sleep(0.05)
    assert watch.taken_us >= 5e4


@pytest.mark.parametrize(
    ("told_us", "passes", "runs"),
    [
        ([5e3, 3e3, 3.01e3, 3e3, 3e3, 3e3], PASSES, 3),  # two agree, the first does not
        ([5e3, 4e3, 3e3, 3.5e3, 4.5e3, 5e3], PASSES, 5),  # none do
        ([100.0] * 8, PASSES, 8),  # two agree at once, and runs cost nothing
        ([3e3] * 25, 1, 17),  # no other pass confirms what these say
    ],
)
def test_runs_of_a_pass_end_once_two_agree(told_us: list[float], passes: int, runs: int) -> None:
    left = list(told_us)
    median_us = median_of(lambda: left.pop(0), passes)
    assert len(told_us) - len(left) == runs
    assert median_us == sorted(told_us[:runs])[runs // 2]
