"""Workspaces between the sizes at which they were measured."""

from __future__ import annotations

import numpy as np

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.shapes.workspaces import Workspaces
from tests.ranged_graphs import chain

GRAPH = chain("64*n", layers=2)
SIZES = (2, 9, 40)


def plain(n: int) -> TrainingGraph:
    return GRAPH.at(n=n)


def at(n: int, *of_first_op: int) -> int:
    measured = [[made] + [0] * (len(GRAPH.base.ops) - 1) for made in of_first_op]
    known = Workspaces(measured, [plain(size) for size in SIZES])
    upper = next(i for i, size in enumerate(SIZES) if n <= size)
    sizes = np.array([value.size_bytes for value in plain(n).values], dtype=np.int64)
    return int(known.at(upper, sizes)[0])


def test_one_in_proportion_to_a_value_is_so_between_too() -> None:
    assert at(20, 10 + 16 * 2, 10 + 16 * 9, 10 + 16 * 40) == 10 + 16 * 20
    assert at(9, 10 + 16 * 2, 10 + 16 * 9, 10 + 16 * 40) == 10 + 16 * 9


def test_any_other_is_the_largest_up_to_the_next_larger_size() -> None:
    assert at(3, 100, 300, 200) == 300
    assert at(20, 100, 300, 200) == 300
    assert at(2, 100, 300, 200) == 100
    assert at(20, 8, 8, 4096) == 4096
    assert at(20, 64, 64, 64) == 64


def test_two_points_make_no_line() -> None:
    rest = [0] * (len(GRAPH.base.ops) - 1)
    known = Workspaces([[32, *rest], [640, *rest]], [plain(2), plain(40)])
    sizes = np.array([value.size_bytes for value in plain(20).values], dtype=np.int64)
    assert int(known.at(1, sizes)[0]) == 640
