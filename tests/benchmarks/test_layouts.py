"""Rows of `benchmarks.layouts`: two steps of one plan, and what a row must keep."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.layouts import is_close, placed, twice
from remat.schedules.layout import buffers_of
from remat.solver import make_solver
from tests.solver.graphs.random_graphs import gpt_like


def test_two_steps_have_the_load_of_one() -> None:
    graph = gpt_like(3)
    one = buffers_of(graph, make_solver("store_all").schedule(graph))
    two = twice(one)
    assert len(two) == 2 * len(one)
    assert two.load_bytes == one.load_bytes
    assert two.n_times == 2 * one.n_times
    row = placed("two steps", 1.0, two)
    assert row["buffers"] == len(two)
    assert is_close(row)


@pytest.mark.parametrize(
    ("row", "is_near"),
    [
        ({"gap": 0.0005, "part": 1.0, "cpu_s": 1.0}, True),
        ({"gap": 0.005, "part": 1.0, "cpu_s": 1.0}, False),
        ({"gap": 0.005, "part": 0.0, "cpu_s": 1.0}, True),
        ({"gap": 0.02, "part": 0.0, "cpu_s": 1.0}, False),
        ({"gap": 0.0, "part": 1.0, "cpu_s": 5.5}, False),
    ],
)
def test_a_row_is_held_to_gap_and_seconds(row: dict[str, Any], is_near: bool) -> None:
    assert is_close(row) == is_near
