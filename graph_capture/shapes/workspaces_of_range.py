"""Workspaces at any sizes of a range, where one or several sizes vary.

With one size, all points are in a row. With several, the points at which ops are priced go from the
smallest sizes to the largest; beside them, each size varies by itself, with all others at their
largest. A workspace that varies with one size alone then follows from that one. Attention's buffers
are of that kind: they are those of a thread, whatever the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.shapes.ranges import Sizes
from remat.graph_capture.shapes.workspaces import WorkspacePoint, Workspaces

Ints = NDArray[np.int64]


class WorkspacesOfRange:
    """Workspaces between the points of a range.

    Parameters
    ----------
    points, graphs : from the smallest sizes to the largest, and the unpriced graph at each.
    more, more_graphs : further points: of the one size that varies, or along one size each.
    """

    def __init__(
        self,
        points: Sequence[WorkspacePoint],
        graphs: Sequence[TrainingGraph],
        more: Sequence[WorkspacePoint],
        more_graphs: Sequence[TrainingGraph],
    ) -> None:
        names = list(points[0].sizes)
        if len(names) == 1:
            self._diagonal = _in_a_row([*points, *more], [*graphs, *more_graphs])
            self._along: dict[str, tuple[Workspaces, Ints]] = {}
            return
        self._diagonal = _in_a_row(points, graphs)
        rows = {name: _row_of(name, [*more, points[-1]]) for name in names}
        along = {
            name: _in_a_row(row, [graphs[-1]] * len(row), name)
            for name, row in rows.items()
            if len(row) > 1
        }
        axes = Counter(i for one in along.values() for i in one.varying().tolist())
        self._along = {
            name: (one, np.array([i for i in one.varying() if axes[int(i)] == 1], dtype=np.int64))
            for name, one in along.items()
        }

    def at(self, sizes: Sizes, value_bytes: Ints, *, is_bound: bool) -> Ints:
        """Workspace of each op; see `Workspaces.at`.

        A bound is no less than what was measured at the priced points up to these sizes.
        """
        found = self._diagonal.at(sizes, value_bytes, is_bound=is_bound)
        for one, ops in self._along.values():
            own = one.at(sizes, value_bytes, is_bound=is_bound)[ops]
            found[ops] = np.maximum(own, found[ops]) if is_bound else own
        return found


def _row_of(name: str, points: Sequence[WorkspacePoint]) -> list[WorkspacePoint]:
    """The points that differ from the last one in one size alone, and it."""
    last = points[-1].sizes
    others = {other: size for other, size in last.items() if other != name}
    return [one for one in points if all(one.sizes[k] == size for k, size in others.items())]


def _in_a_row(
    points: Sequence[WorkspacePoint], graphs: Sequence[TrainingGraph], along: str = ""
) -> Workspaces:
    pairs = sorted(zip(points, graphs, strict=True), key=lambda pair: tuple(pair[0].sizes.values()))
    return Workspaces(
        [one.sizes for one, _ in pairs],
        [one.workspace_bytes for one, _ in pairs],
        [graph for _, graph in pairs],
        along,
    )
