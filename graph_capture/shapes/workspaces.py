"""Workspaces of ops at any size of a range, from those at a few sizes.

A kernel may choose by the size, so that its workspace follows no formula: then it is taken to be
the largest that was measured up to the next larger size. Many are in proportion to a tensor that
the op reads or makes, beside a constant: where that gives what was measured to the byte at all
points, it is taken to hold between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from remat.graph_capture.graph import TrainingGraph

Ints = NDArray[np.int64]
LEAST_POINTS = 3
"""Any two points are on a line."""
SLACK = 1e-6
"""Of a byte: what floats may be off."""


class _Line(NamedTuple):
    """Workspace `made` at `size` bytes of a value, and `more` for each further `step` bytes."""

    op: int
    value: int
    size: int
    made: int
    step: int
    more: int


class Workspaces:
    """Workspaces between points, which go from the smallest sizes to the largest.

    Parameters
    ----------
    measured : of each op, at each point. graphs : the unpriced graph at each point.
    """

    def __init__(self, measured: Sequence[Sequence[int]], graphs: Sequence[TrainingGraph]) -> None:
        self._upper: Ints = np.maximum.accumulate(np.array(measured, dtype=np.int64), axis=0)
        lines = _lines(np.array(measured, dtype=np.int64), graphs)
        self._lines: Ints = np.array(lines, dtype=np.int64).reshape(-1, len(_Line._fields)).T
        self._on_line = np.unique(self._lines[0])

    def at(self, upper: int, value_bytes: Ints) -> Ints:
        """Workspace of each op.

        Parameters
        ----------
        upper : the first point whose sizes are none of them smaller. value_bytes : of each value of
            the graph, in its order, as its shape says.
        """
        found = self._upper[upper].copy()
        op, value, size, made, step, more = self._lines
        found[self._on_line] = 0
        beyond = (value_bytes[value] - size) * (more / np.maximum(step, 1))
        np.maximum.at(found, op, made + np.ceil(beyond - SLACK).astype(np.int64))
        return found


def _lines(measured: Ints, graphs: Sequence[TrainingGraph]) -> list[_Line]:
    if len(graphs) < LEAST_POINTS:
        return []
    index = {value.name: i for i, value in enumerate(graphs[0].values)}
    sizes = np.array([[value.size_bytes for value in graph.values] for graph in graphs])
    found: list[_Line] = []
    for i, op in enumerate(graphs[0].ops):
        if measured[0, i] == measured[-1, i]:
            continue
        values = dict.fromkeys(index[name] for name in (*op.inputs, *op.outputs))
        found += [
            _Line(i, v, int(sizes[0, v]), int(measured[0, i]), step, more)
            for v in values
            if (step := int(sizes[-1, v] - sizes[0, v])) > 0
            if (more := int(measured[-1, i] - measured[0, i])) > 0
            if _are_on_line(sizes[:, v].tolist(), measured[:, i].tolist())
        ]
    return found


def _are_on_line(sizes: list[int], made: list[int]) -> bool:
    """Whether all points are on the line of the two ends, and all sizes differ."""
    step, more = sizes[-1] - sizes[0], made[-1] - made[0]
    rises = all(a < b for a, b in itertools.pairwise(sizes))
    return rises and all(
        (m - made[0]) * step == (s - sizes[0]) * more for s, m in zip(sizes, made, strict=True)
    )
