"""Workspaces between the sizes at which they were measured."""

from __future__ import annotations

import numpy as np

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.sizes.range_costs import (
    WorkspacePoint,
    Workspaces,
    WorkspacesOfRange,
    off_lines,
)
from tests.ranged_graphs import chain

GRAPH = chain("64*n", layers=2)
SIZES = (2, 9, 40)


def plain(n: int) -> TrainingGraph:
    return GRAPH.at(n=n)


def at(n: int, *of_first_op: int, sizes: tuple[int, ...] = SIZES, is_bound: bool = False) -> int:
    measured = [[made] + [0] * (len(GRAPH.base.ops) - 1) for made in of_first_op]
    points = [{"n": size} for size in sizes]
    known = Workspaces(points, measured, [plain(size) for size in sizes])
    value_bytes = np.array([value.size_bytes for value in plain(n).values], dtype=np.int64)
    return int(known.at({"n": n}, value_bytes, is_bound=is_bound)[0])


def test_one_in_proportion_to_a_value_is_so_between_too() -> None:
    assert at(20, 10 + 16 * 2, 10 + 16 * 9, 10 + 16 * 40) == 10 + 16 * 20
    assert at(9, 10 + 16 * 2, 10 + 16 * 9, 10 + 16 * 40) == 10 + 16 * 9


def test_any_other_is_the_larger_of_those_beside_it() -> None:
    assert at(3, 100, 300, 200) == 300
    assert at(20, 100, 300, 200) == 300
    assert at(40, 100, 300, 200) == 200
    assert at(2, 100, 300, 200) == 100
    assert at(20, 8, 8, 4096) == 4096
    assert at(20, 64, 64, 64) == 64


def test_a_bound_is_no_less_than_any_at_smaller_sizes() -> None:
    for made in ((100, 300, 200), (900, 300, 200), (26, 82, 330), (7, 7, 9)):
        found = [at(n, *made) for n in range(2, 41)]
        bounds = [at(n, *made, is_bound=True) for n in range(2, 41)]
        assert all(bound >= max(found[: i + 1]) for i, bound in enumerate(bounds))
    assert at(40, 100, 300, 200, is_bound=True) == 300


def test_a_line_goes_as_far_as_three_points_do() -> None:
    """From 20 on it rises twice as fast; after 30 it falls."""
    sizes, made = (2, 9, 20, 25, 30, 40), (32, 144, 320, 480, 640, 500)
    assert at(5, *made, sizes=sizes) == 80
    assert at(28, *made, sizes=sizes) == 576
    assert at(28, *made, sizes=sizes, is_bound=True) == 576
    assert at(35, *made, sizes=sizes) == 640
    assert at(40, *made, sizes=sizes) == 500


def test_two_points_make_no_line() -> None:
    assert at(20, 32, 640, sizes=(2, 40)) == 640


def test_ops_off_a_line_are_told() -> None:
    rest = [0] * (len(GRAPH.base.ops) - 1)
    graphs = [plain(size) for size in SIZES]
    name = GRAPH.base.ops[0].name
    assert name in off_lines(graphs, [[made, *rest] for made in (100, 300, 200)])
    assert off_lines(graphs, [[16 * size, *rest] for size in SIZES]) == []
    assert off_lines(graphs, [[0, *rest]] * 3) == []


def of_two(n: int, m: int, *, is_bound: bool = False) -> list[int]:
    """Workspaces of three ops over n and m: 8 n of the first, of both, and of neither."""

    rest = (64,) * (len(GRAPH.base.ops) - 2)

    def point(n: int, m: int) -> WorkspacePoint:
        return WorkspacePoint({"n": n, "m": m}, (8 * n, n * m, *rest))

    points = [point(2, 3), point(6, 20), point(30, 100)]
    more = [point(k, 100) for k in (2, 10, 20)] + [point(30, k) for k in (3, 40, 80)]
    graph = GRAPH.at(n=2)
    known = WorkspacesOfRange(points, [graph] * len(points), more, [graph] * len(more))
    value_bytes = np.zeros(len(graph.values), dtype=np.int64)
    return known.at({"n": n, "m": m}, value_bytes, is_bound=is_bound).tolist()[:3]


def test_one_that_varies_with_one_of_two_sizes_follows_from_that_one() -> None:
    assert of_two(15, 50) == [8 * 15, 30 * 100, 64]
    assert of_two(2, 3) == [16, 6, 64]
    assert of_two(2, 3, is_bound=True) == [16, 6, 64]
    assert of_two(15, 4, is_bound=True)[0] >= 8 * 15
