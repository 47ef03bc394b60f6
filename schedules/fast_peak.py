"""The peak of one schedule for many sizes of its values, without a replay for each.

Which values are live at which step does not depend on their sizes. So the steps are read once, and
the peak for other sizes is a sum along them. The judge is `simulate`: what a search finds by these
books is judged by it before it is used.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.shapes.bytes_over import PartBytes
from remat.schedules.schedule import Compute, Schedule, brought, dropped

Ints = NDArray[np.int64]


class FastPeak:
    """The peak of `schedule`, which is valid for `graph`, for other bytes of its values."""

    def __init__(self, graph: TrainingGraph, schedule: Schedule) -> None:
        self.index = {value.name: i for i, value in enumerate(graph.values)}
        self.op_of_step = np.full(len(schedule.steps), -1, dtype=np.int64)
        # While a step runs: values that it makes. From the next step on: what came or went.
        made: list[tuple[int, int, int]] = []
        changed: list[tuple[int, int, int]] = []
        live: set[str] = set()
        for i, step in enumerate(schedule.steps):
            if isinstance(step, Compute):
                self.op_of_step[i] = graph.op_index[step.op]
                outputs = graph.ops[graph.op_index[step.op]].outputs
                made += [(i, self.index[name], 1) for name in outputs]
                fresh = [name for name in outputs if name not in live]
            else:
                fresh = [brought(step)] if brought(step) else []
                made += [(i, self.index[name], 1) for name in fresh]
            changed += [(i + 1, self.index[name], 1) for name in fresh]
            live.update(fresh)
            if not isinstance(step, Compute) and dropped(step):
                changed.append((i + 1, self.index[step.value], -1))
                live.discard(step.value)
        self.made, self.changed = _columns(made), _columns(changed)

    def peak_bytes(self, size: PartBytes) -> int:
        """The peak with these bytes of values, workspaces and what is resident."""
        n_steps = len(self.op_of_step)
        change = _sums(self.changed, size.values, n_steps + 1)
        running = np.cumsum(change)[:n_steps] + _sums(self.made, size.values, n_steps)
        is_op = self.op_of_step >= 0
        running[is_op] += size.workspaces[self.op_of_step[is_op]]
        return size.resident_bytes + int(running.max(initial=0))


def _columns(entries: list[tuple[int, int, int]]) -> Ints:
    return np.array(entries, dtype=np.int64).reshape(-1, 3).T


def _sums(entries: Ints, sizes: Ints, n_steps: int) -> Ints:
    """The signed sizes of the values at each step, added up."""
    found = np.zeros(n_steps, dtype=np.int64)
    steps, values, signs = entries
    np.add.at(found, steps, signs * sizes[values])
    return found
