"""The buffers of a schedule: what is where in time, as the judge counts it.

A schedule is a list of steps. An allocator, a layout and a picture of addresses want the same
facts by buffer: so many bytes, from here to there. `buffers_of` gives them. It is one more view of
the rules of `simulate`: the most bytes live at once, plus what is resident, is the peak that
`simulate` finds, of each schedule.

Time counts the steps that bring bytes: runs of ops, and fetches. A buffer is live in
[start, end). A run makes each of its outputs anew. The second copy of an output that was live
counts while the op runs, as its workspace does.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from remat.graph_capture.errors import LayoutError
from remat.graph_capture.graph import Op, TrainingGraph
from remat.graph_capture.graph_rules import MOST_BYTES
from remat.schedules.as_planned import as_planned
from remat.schedules.schedule import Compute, Schedule, brought, dropped
from remat.schedules.simulate import simulate
from remat.schedules.update_workspaces import workspaces_of_updates

Ints = NDArray[np.int64]
Numbers = Sequence[int] | Ints


class BufferKind(IntEnum):
    """What a buffer is: a value that is freed, one that outlives the step, or bytes of one run."""

    VALUE = 0
    LASTING = 1
    COPY = 2
    WORKSPACE = 3


@dataclass(frozen=True, eq=False)
class Buffers:
    """Buffers of one step by start; those of one run in the order of its outputs, workspace last.

    Attributes
    ----------
    size_bytes : bytes of each, as the graph has them; none is 0.
    start, end : time from which it is live, and first time at which it no longer is.
    kind : a `BufferKind` each.
    names : the value that each holds, or the op whose workspace it is.
    n_times : length of time; `end` of what outlives the step.
    forward_end : first time after the last first run of a forward op.
    resident_bytes : bytes that live through the step and are no buffers.
    """

    size_bytes: Ints
    start: Ints
    end: Ints
    kind: Ints
    names: tuple[str, ...]
    n_times: int
    forward_end: int = 0
    resident_bytes: int = 0

    def __post_init__(self) -> None:
        lengths = {len(self.start), len(self.end), len(self.kind), len(self.names)}
        if lengths != {len(self.size_bytes)}:
            raise LayoutError("buffers need one size, start, end, kind and name each")
        if len(self) == 0:
            return
        if int(self.size_bytes.min()) <= 0:
            raise LayoutError("a buffer of 0 bytes or less has no place: leave it out")
        if sum(self.size_bytes.tolist()) >= MOST_BYTES:
            raise LayoutError("the buffers are too large in all for 64-bit integers")
        if (self.start < 0).any() or (self.start >= self.end).any():
            raise LayoutError("a buffer ends before it starts, or starts before time 0")
        if int(self.end.max()) > self.n_times:
            raise LayoutError(f"a buffer ends after the last time, {self.n_times}")

    @classmethod
    def of_arrays(
        cls,
        size_bytes: Sequence[int] | Ints,
        start: Sequence[int] | Ints,
        end: Sequence[int] | Ints,
    ) -> Buffers:
        """Buffers that no schedule stands behind, as a published instance has them."""
        sizes, starts, ends = (np.asarray(a, np.int64) for a in (size_bytes, start, end))
        n_times = int(ends.max()) if ends.size else 0
        names = tuple(f"b{i}" for i in range(sizes.size))
        return cls(sizes, starts, ends, np.zeros(sizes.size, np.int64), names, n_times)

    def __len__(self) -> int:
        return len(self.size_bytes)

    @functools.cached_property
    def live_bytes(self) -> Ints:
        """Bytes live at each time, `n_times` numbers, what is resident apart."""
        change = np.zeros(self.n_times + 1, np.int64)
        np.add.at(change, self.start, self.size_bytes)
        np.add.at(change, self.end, -self.size_bytes)
        return np.cumsum(change)[:-1]

    @functools.cached_property
    def load_bytes(self) -> int:
        """The most bytes live at once, what is resident apart: no layout takes less."""
        return int(self.live_bytes.max(initial=0))

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 over sizes, starts and ends: what a layout of these buffers relies on."""
        digest = hashlib.sha256(b"%d" % len(self))
        for column in (self.size_bytes, self.start, self.end):
            digest.update(np.ascontiguousarray(column, "<i8").tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"Buffers({len(self)} in {self.n_times} times, load {self.load_bytes} bytes)"


def buffers_of(graph: TrainingGraph, schedule: Schedule) -> Buffers:
    """Each stay of each value on the device, each second copy, and each run's workspace.

    The buffer of a value that goes to the host ends where it is freed; its fetch begins another.

    Raises
    ------
    ScheduleError : the schedule is of another graph, or `simulate` finds a rule broken.
    """
    graph = as_planned(graph, schedule)
    simulate(graph, schedule)
    return _Walk(graph).run(schedule)


class _Walk:
    """One pass over a valid schedule."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self.size = {value.name: value.size_bytes for value in graph.values}
        self.rows: list[list[int]] = []
        self.names: list[str] = []
        self.live: dict[str, int] = {}
        self.now = 0
        self.first_runs: dict[str, int] = {}
        self.update_workspaces: dict[str, int] = {}

    def run(self, schedule: Schedule) -> Buffers:
        self.update_workspaces = workspaces_of_updates(self.graph, schedule)
        for step in schedule.steps:
            if isinstance(step, Compute):
                self._compute(self.graph.ops[self.graph.op_index[step.op]])
                self.now += 1
            elif brought(step):
                self._begin(step.value)
                self.now += 1
            elif dropped(step):
                self.rows[self.live.pop(step.value)][2] = self.now
        for row in self.live.values():
            self.rows[row][2:] = self.now, BufferKind.LASTING
        return self._buffers()

    def _compute(self, op: Op) -> None:
        for value in op.outputs:
            if value in self.live:
                self._add(value, self.size[value], BufferKind.COPY)
            else:
                self._begin(value)
        workspace_bytes = self.update_workspaces.get(op.name, op.workspace_bytes)
        self._add(op.name, workspace_bytes, BufferKind.WORKSPACE)
        self.first_runs.setdefault(op.name, self.now)

    def _begin(self, value: str) -> None:
        self.live[value] = len(self.rows)
        self._add(value, self.size[value], BufferKind.VALUE)

    def _add(self, name: str, size_bytes: int, kind: BufferKind) -> None:
        """What is no value is live at this time alone; a value until it is dropped."""
        self.rows.append([size_bytes, self.now, self.now + 1, kind])
        self.names.append(name)

    def _buffers(self) -> Buffers:
        table = np.array(self.rows, np.int64).reshape(-1, 4)
        has_bytes = table[:, 0] > 0
        size_bytes, start, end, kind = table[has_bytes].T.copy()
        forward = (op.name for op in self.graph.ops if op.phase == "forward")
        return Buffers(
            size_bytes,
            start,
            end,
            kind,
            tuple(name for name, stays in zip(self.names, has_bytes, strict=True) if stays),
            n_times=self.now,
            forward_end=max((self.first_runs[name] + 1 for name in forward), default=0),
            resident_bytes=self.graph.resident.total_bytes,
        )
