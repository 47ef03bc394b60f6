"""Addresses against time, as few rectangles: what a picture of a layout draws.

A step of thousands of ops has tens of thousands of buffers, most too low to be seen. Those, and
what is beyond the largest few thousand, are merged into rectangles that cover them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat.graph_capture.graph import Ints, TrainingGraph
from remat.schedules.derived import graph_of_schedule
from remat.schedules.layout import BufferKind, Buffers, Layout, buffers_of, check_layout
from remat.schedules.schedule import Schedule

ROWS, _COLUMNS = 256, 1024
"""Of the grid on which small buffers are merged; a buffer below one row is small."""
MOST_BOXES, MOST_MERGED = 3000, 2000
"""Rectangles of buffers of their own, and of merged ones."""


class Box(NamedTuple):
    """One buffer: bytes low..high - 1 of the arena, live in [start, end)."""

    name: str
    kind: str
    start: int
    end: int
    low: int
    high: int


class _Merged(NamedTuple):
    start: float
    end: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Addresses:
    layout: Layout
    buffers: Buffers
    boxes: tuple[Box, ...]
    merged: tuple[_Merged, ...]
    n_merged: int


def addresses(graph: TrainingGraph, schedule: Schedule, layout: Layout) -> Addresses:
    buffers = buffers_of(graph, schedule)
    check_layout(buffers, layout)
    area = buffers.size_bytes.astype(np.float64) * (buffers.end - buffers.start)
    largest = np.argsort(-area, kind="stable")
    # Buffers lower than one row of the grid are too small to see.
    shown = largest[buffers.size_bytes[largest] * ROWS >= layout.arena_bytes][:MOST_BOXES]
    is_small = np.ones(len(buffers), bool)
    is_small[shown] = False
    kinds = kinds_of_buffers(graph_of_schedule(graph, schedule), buffers)
    low = np.array(layout.offsets_bytes, np.int64)
    boxes = tuple(
        Box(
            buffers.names[i], kinds[i], int(buffers.start[i]), int(buffers.end[i]),
            int(low[i]), int(low[i] + buffers.size_bytes[i]),
        )
        for i in shown.tolist()
    )  # fmt: skip
    merged = _over_small(buffers, low, layout.arena_bytes, is_small)
    return Addresses(layout, buffers, boxes, merged, int(is_small.sum()))


def kinds_of_buffers(graph: TrainingGraph, buffers: Buffers) -> list[str]:
    return [
        "workspace" if kind == BufferKind.WORKSPACE else graph.value_by_name[name].kind
        for name, kind in zip(buffers.names, buffers.kind, strict=True)
    ]


def _over_small(
    buffers: Buffers, low: Ints, arena_bytes: int, is_small: NDArray[np.bool_]
) -> tuple[_Merged, ...]:
    if not is_small.any():
        return ()
    rows, columns = ROWS, min(_COLUMNS, buffers.n_times)
    top = low + buffers.size_bytes
    edges = [one[is_small].astype(np.float64) for one in (buffers.start, buffers.end, low, top)]
    # Coarsen the grid until the page can hold all rectangles.
    while True:
        x, y = columns / buffers.n_times, rows / arena_bytes
        on_grid = [edge * scale for edge, scale in zip(edges, (x, x, y, y), strict=True)]
        found = _rectangles(_covered(*on_grid, rows=rows, columns=columns))
        if len(found) <= MOST_MERGED:
            return tuple(_Merged(a / x, b / x, c / y, d / y) for a, b, c, d in found)
        rows, columns = max(rows // 2, 1), max(columns // 2, 1)


_Corners = NDArray[np.float64]


def _covered(
    start: _Corners, end: _Corners, low: _Corners, high: _Corners, *, rows: int, columns: int
) -> NDArray[np.bool_]:
    """The cells that rectangles touch, rows by columns."""
    x0, y0 = np.floor(start).astype(np.int64), np.floor(low).astype(np.int64)
    x1 = np.minimum(np.ceil(end), columns).astype(np.int64)
    y1 = np.minimum(np.ceil(high), rows).astype(np.int64)
    # A two-dimensional prefix sum: mark the corners, then add up along both axes.
    change = np.zeros((rows + 1, columns + 1), np.int64)
    for row, column, sign in ((y0, x0, 1), (y0, x1, -1), (y1, x0, -1), (y1, x1, 1)):
        np.add.at(change, (row, column), sign)
    return change.cumsum(0).cumsum(1)[:-1, :-1] > 0


def _rectangles(covered: NDArray[np.bool_]) -> list[tuple[int, int, int, int]]:
    """(start, end, low, high) of runs of cells; runs that are the same in rows above are one."""
    found: list[tuple[int, int, int, int]] = []
    open_since: dict[tuple[int, int], int] = {}
    # An empty last row closes the rectangles that are still open.
    for row, cells in enumerate([*covered, np.zeros(covered.shape[1], bool)]):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], cells, [False]])))
        runs = [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
        ended = [run for run in open_since if run not in set(runs)]
        found += [(*run, open_since.pop(run), row) for run in ended]
        for run in runs:
            open_since.setdefault(run, row)
    return found
