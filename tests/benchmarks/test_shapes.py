"""What the benchmark of ranges takes for a miss."""

from __future__ import annotations

from typing import Any

from benchmarks.shapes import failures

GOOD: dict[str, Any] = {
    "plans": 2.0, "beyond_us": 5.0, "points_above_alone": 0.7,
    "dynamic": {"plans": 1, "peaks_above": 0, "refused": 0},
}  # fmt: skip


def test_each_aim_that_is_missed_is_named() -> None:
    assert failures(GOOD) == []
    bad: dict[str, Any] = {"plans": 4.5, "beyond_us": 51.0, "points_above_alone": 1.2}
    bad["dynamic"] = {"plans": 2, "peaks_above": 1, "refused": 1}
    assert len(failures(bad)) == 6
    assert failures({**GOOD, "plans": 4.5}) == ["the family takes 4.5 plans"]
    assert failures({**GOOD, "dynamic": {}}) == []
