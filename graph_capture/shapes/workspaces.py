"""Workspaces of ops at any size of a range, from those at some sizes; and what kernels keep.

A kernel may choose by the size, so that its workspace follows no formula: then it is taken to be
the larger of those at the measured sizes next to it. Many are in proportion to a tensor that the op
reads or makes, beside a constant, from one size to another: where that gives what was measured to
the byte at three sizes in a row, it is taken to hold between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.shapes.ranges import Sizes

Ints = NDArray[np.int64]
ON_LINE = 3
"""Points in a row that make a line: any two are on one."""
NONE_YET = np.iinfo(np.int64).min
SLACK = 1e-6
"""Of a byte: what floats may be off."""


class WorkspacePoint(msgspec.Struct, frozen=True):
    """Workspaces that were measured at one size; of each op, in the graph's order."""

    sizes: dict[str, int]
    workspace_bytes: tuple[int, ...]


class _Line(NamedTuple):
    """Workspace `made` at `size` bytes of a value, and `more` for each further `step` bytes.

    It holds up to the point `last`, from the point before `first` on.
    """

    op: int
    value: int
    size: int
    made: int
    step: int
    more: int
    first: int
    last: int


class Workspaces:
    """Workspaces between points, which go from the smallest sizes to the largest.

    Parameters
    ----------
    sizes, graphs : of each point; the graphs are unpriced. measured : at each point, of each op, or
        of whatever else `beside` is for.
    beside : for each that was measured the values with which it may grow; left out, those that the
        op reads or makes.
    along : the only size that varies from point to point, in which lines then are; left out, they
        are in bytes of values.
    """

    def __init__(
        self,
        sizes: Sequence[Sizes],
        measured: Sequence[Sequence[int]],
        graphs: Sequence[TrainingGraph],
        along: str = "",
        beside: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self._sizes, self._along = sizes, along
        self._measured: Ints = np.array(measured, dtype=np.int64)
        self._most: Ints = np.maximum.accumulate(self._measured, axis=0)
        if along:
            lines = _lines_along([one[along] for one in sizes], self._measured)
        else:
            lines = _lines(self._measured, graphs, beside)
        self._lines: Ints = np.array(lines, dtype=np.int64).reshape(-1, len(_Line._fields))

    def at(self, sizes: Sizes, value_bytes: Ints, *, is_bound: bool) -> Ints:
        """Workspace of each op.

        Parameters
        ----------
        value_bytes : of each value of the graph, in its order, as its shape says.
        is_bound : whether it is to bound the workspaces at all smaller sizes too.
        """
        if self._along:
            sizes = {**self._sizes[-1], self._along: sizes[self._along]}
            value_bytes = np.array([sizes[self._along]], dtype=np.int64)
        upper = next(i for i, one in enumerate(self._sizes) if is_within(sizes, one))
        lines = self._lines[(self._lines[:, -2] <= upper) & (upper <= self._lines[:, -1])].T
        found = self._beside(upper, sizes, is_bound)
        op, value, size, made, step, more = lines[:-2]
        # A line rises, so that all that is below it was measured before its point.
        found[op] = self._most[upper - 1][op] if is_bound and upper else NONE_YET
        beyond = (value_bytes[value] - size) * (more / np.maximum(step, 1))
        np.maximum.at(found, op, made + np.ceil(beyond - SLACK).astype(np.int64))
        return found

    def varying(self) -> Ints:
        """Indices of the ops whose workspace is not the same at all points."""
        return np.flatnonzero((self._measured != self._measured[0]).any(axis=0))

    def _beside(self, upper: int, sizes: Sizes, is_bound: bool) -> Ints:
        """What was measured at these sizes, or next to them."""
        if is_bound or (len(sizes) > 1 and not self._along):
            return self._most[upper].copy()
        if not upper or dict(sizes) == dict(self._sizes[upper]):
            return self._measured[upper].copy()
        return np.maximum(self._measured[upper - 1], self._measured[upper])


def is_within(sizes: Sizes, upper: Sizes) -> bool:
    """Whether none of the sizes is larger than its upper one."""
    return all(size <= upper[name] for name, size in sizes.items())


def off_lines(graphs: Sequence[TrainingGraph], measured: Sequence[Sequence[int]]) -> list[str]:
    """Ops that may have a workspace without a formula, as far as some points tell.

    These are those off a line, and all others of the same kind.
    """
    made: Ints = np.array(measured, dtype=np.int64)
    on_line = {line.op for line in _lines(made, graphs) if line.last - line.first + 2 == len(made)}
    ops = graphs[0].ops
    varying = [i for i in range(len(ops)) if made[:, i].any() and i not in on_line]
    targets = {ops[i].target for i in varying}
    return [op.name for op in ops if op.target in targets]


def _lines(
    measured: Ints,
    graphs: Sequence[TrainingGraph],
    beside: Sequence[Sequence[str]] | None = None,
) -> list[_Line]:
    if len(graphs) < ON_LINE:
        return []
    index = {value.name: i for i, value in enumerate(graphs[0].values)}
    sizes = np.array([[value.size_bytes for value in graph.values] for graph in graphs])
    found: list[_Line] = []
    own = [(*op.inputs, *op.outputs) for op in graphs[0].ops] if beside is None else beside
    for i, names in enumerate(own):
        if (measured[:, i] == measured[0, i]).all():
            continue
        for v in dict.fromkeys(index[name] for name in names):
            found += _lines_of(i, v, sizes[:, v].tolist(), measured[:, i].tolist())
    return found


def _lines_along(sizes: list[int], measured: Ints) -> list[_Line]:
    ops = np.flatnonzero((measured != measured[0]).any(axis=0)).tolist()
    return [line for i in ops for line in _lines_of(i, 0, sizes, measured[:, i].tolist())]


def _lines_of(op: int, value: int, sizes: list[int], made: list[int]) -> list[_Line]:
    """The rising lines on which three or more points in a row are, each as far as it goes."""
    found: list[_Line] = []
    start = 0
    while start + ON_LINE <= len(sizes):
        step, more = sizes[start + 1] - sizes[start], made[start + 1] - made[start]
        end = start + 1
        while end + 1 < len(sizes) and _goes_on(sizes, made, start, end + 1, step, more):
            end += 1
        if end - start + 1 >= ON_LINE and step > 0 and more > 0:
            found.append(_Line(op, value, sizes[start], made[start], step, more, start + 1, end))
        start = end
    return found


def _goes_on(sizes: list[int], made: list[int], start: int, at: int, step: int, more: int) -> bool:
    """Whether the line through the first two points from `start` on goes through the one `at`."""
    rises = sizes[at] > sizes[at - 1]
    return rises and (made[at] - made[start]) * step == (sizes[at] - sizes[start]) * more
