"""What a rule of stopping allows."""

from __future__ import annotations

from remat.solver.stopping import Rounds, Seconds, SlowRound, WorkLimit


def test_seconds_are_a_part_of_what_is_left_within_their_bounds() -> None:
    assert Seconds(part=0.2).of(10.0) == 2.0
    assert Seconds(most_s=5.0).of(10.0) == 5.0
    assert Seconds(most_s=5.0).of(-1.0) == 0.0
    assert Seconds(least_s=0.5).of(-1.0) == 0.5
    assert Seconds(least_s=0.5).of(-1.0, limit_s=0.1) == 0.1
    assert Seconds(most_s=4.0).longer(1.5).of(10.0) == 6.0


def test_larger_graphs_have_fewer_rounds_but_some() -> None:
    assert Rounds(3).at(10**9) == 3
    assert Rounds(2000, times_ops=4000).at(4) == 1000
    assert Rounds(2000, times_ops=4000).at(1) == 2000
    assert Rounds(times_ops=4000, least=20).at(10**6) == 20
    assert Rounds(times_ops=4000, least=20).at(0) == 4000


def test_work_is_counted_from_now() -> None:
    assert WorkLimit(5).from_now(10) == 15


def test_a_slow_round_is_the_last_where_the_gap_is_narrow() -> None:
    rule = SlowRound(narrow=0.01, part=0.9)
    assert rule.is_last(0.0095, 0.01)
    assert not rule.is_last(0.005, 0.01)
    assert not rule.is_last(0.095, 0.1)
