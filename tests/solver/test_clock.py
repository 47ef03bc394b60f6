"""What a clock says of a time limit."""

from __future__ import annotations

import pytest

from remat.solver.search import Clock


def test_what_has_passed_is_no_longer_left() -> None:
    clock = Clock(10.0)
    clock.began_s -= 4.0
    assert clock.elapsed_s + clock.left_s == pytest.approx(10.0, abs=0.1)
    assert 5.0 < clock.left_s <= 6.0


def test_a_part_of_the_time_ends_with_its_block_whatever_happens_in_it() -> None:
    clock = Clock(10.0)
    with pytest.raises(KeyboardInterrupt):
        _interrupted_within(clock)
    assert clock.time_limit_s == 10.0


def _interrupted_within(clock: Clock) -> None:
    with clock.limited_to(0.0):
        assert clock.left_s <= 0
        raise KeyboardInterrupt
