"""The layout of a step's buffers in one arena, and `check_layout`, the judge of layouts.

It is short, slow enough to be obviously right, and does not know what made a layout. No layout
leaves `solver/layout/` unjudged.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

import numpy as np

from remat.graph_capture.devices.known_devices import ALLOCATION_BYTES, CPU
from remat.graph_capture.errors import LayoutError, RematError
from remat.graph_capture.files import Record
from remat.graph_capture.graph import MOST_BYTES, Ints, Op, TrainingGraph
from remat.schedules.derived import graph_of_schedule
from remat.schedules.schedule import (
    Compute,
    Schedule,
    fetched_value,
    freed_value,
    workspaces_of_updates,
)
from remat.schedules.simulate import simulate

# Time counts the steps that bring bytes: runs and fetches. A buffer is live in [start, end).
# The second copy of a live output counts while the op runs, as its workspace does.

_Numbers = Sequence[int] | Ints


class BufferKind(IntEnum):
    """What a buffer is: a value that is freed, one that outlives the step, or bytes of one run."""

    VALUE = 0
    LASTING = 1
    COPY = 2
    WORKSPACE = 3


@dataclass(frozen=True, eq=False)
class Buffers:
    """Buffers of one step by start; those of one run in the order of outputs, workspace last."""

    size_bytes: Ints  # as the graph has them; none is 0
    start: Ints  # time from which each is live
    end: Ints  # first time at which it no longer is
    kind: Ints  # a `BufferKind` each
    names: tuple[str, ...]  # the value that each holds, or the op whose workspace it is
    n_times: int  # length of time; `end` of what outlives the step
    forward_end: int = 0  # first time after the last first run of a forward op
    resident_bytes: int = 0  # that live through the step and are no buffers

    def __post_init__(self) -> None:
        lengths = {len(self.start), len(self.end), len(self.kind), len(self.names)}
        if lengths != {len(self.size_bytes)}:
            raise LayoutError("give each buffer one size, start, end, kind and name")
        if len(self) == 0:
            return
        if int(self.size_bytes.min()) <= 0:
            raise LayoutError("leave out buffers of 0 bytes or less: they have no place")
        # As Python integers: in 64 bits the sum could wrap around.
        if sum(self.size_bytes.tolist()) >= MOST_BYTES:
            raise LayoutError("the buffers together are too large for 64-bit integers")
        if (self.start < 0).any() or (self.start >= self.end).any():
            raise LayoutError("a buffer ends before it starts, or starts before time 0")
        if int(self.end.max()) > self.n_times:
            raise LayoutError(f"a buffer ends after the last time, {self.n_times}")

    @classmethod
    def of_arrays(cls, size_bytes: _Numbers, start: _Numbers, end: _Numbers) -> Buffers:
        sizes, starts, ends = (np.asarray(a, np.int64) for a in (size_bytes, start, end))
        n_times = int(ends.max()) if ends.size else 0
        names = tuple(f"b{i}" for i in range(sizes.size))
        return cls(sizes, starts, ends, np.zeros(sizes.size, np.int64), names, n_times)

    def __len__(self) -> int:
        return len(self.size_bytes)

    @functools.cached_property
    def live_bytes(self) -> Ints:
        """Bytes live at each time, `n_times` numbers, what is resident apart."""
        return live_sums(self.size_bytes, self.start, self.end, self.n_times)

    @functools.cached_property
    def load_bytes(self) -> int:
        """The most bytes live at once, what is resident apart: no layout takes less."""
        return int(self.live_bytes.max(initial=0))

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 over sizes, starts and ends: what a layout of these buffers relies on."""
        digest = hashlib.sha256(b"%d" % len(self))
        for column in (self.size_bytes, self.start, self.end):
            # Little-endian: the same hash on every machine.
            digest.update(np.ascontiguousarray(column, "<i8").tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"Buffers({len(self)} in {self.n_times} times, load {self.load_bytes} bytes)"


def live_sums(size: Ints, start: Ints, end: Ints, n_times: int) -> Ints:
    """At each time the sum of the sizes that are live in [start, end)."""
    change = np.zeros(n_times + 1, np.int64)
    np.add.at(change, start, size)
    np.add.at(change, end, -size)
    return np.cumsum(change)[:-1]  # at `n_times` all is over


def buffers_of(graph: TrainingGraph, schedule: Schedule) -> Buffers:
    """Each stay of each value on the device (a fetch begins one), second copies, and workspaces."""
    graph = graph_of_schedule(graph, schedule)
    simulate(graph, schedule)  # the walk below relies on a valid schedule
    return _Walk(graph).run(schedule)


def kinds_of_buffers(graph: TrainingGraph, buffers: Buffers) -> list[str]:
    return [
        "workspace" if kind == BufferKind.WORKSPACE else graph.value_by_name[name].kind
        for name, kind in zip(buffers.names, buffers.kind, strict=True)
    ]


class _Walk:
    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self.size = {value.name: value.size_bytes for value in graph.values}
        self.rows, self.names = list[list[int]](), list[str]()
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
            elif fetched_value(step):
                self._begin(step.value)
                self.now += 1
            elif freed_value(step):
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
        self.rows.append([size_bytes, self.now, self.now + 1, kind])  # `run` extends values'
        self.names.append(name)

    def _buffers(self) -> Buffers:
        table = np.array(self.rows, np.int64).reshape(-1, 4)
        has_bytes = table[:, 0] > 0  # `Buffers` refuses buffers of 0 bytes
        size_bytes, start, end, kind = table[has_bytes].T.copy()
        forward = (op.name for op in self.graph.ops if op.phase == "forward")
        names = tuple(name for name, stays in zip(self.names, has_bytes, strict=True) if stays)
        forward_end = max((self.first_runs[name] + 1 for name in forward), default=0)
        resident_bytes = self.graph.resident.total_bytes
        return Buffers(size_bytes, start, end, kind, names, self.now, forward_end, resident_bytes)


CPU_ALIGNMENT_BYTES = 64  # torch's allocator for the CPU aligns to it (`c10/core/alignment.h`)


class Layout(Record, frozen=True):
    noun: ClassVar[str] = "layout"
    again: ClassVar[str] = "make it again with remat run MODEL --budget BUDGET --layout FILE"
    error: ClassVar[type[RematError]] = LayoutError
    offsets_bytes: tuple[int, ...]  # in the order of `Buffers`, from the start of the arena
    arena_bytes: int  # from its start to the end of the buffer that ends last
    load_bytes: int  # the most bytes live at once: no arena is smaller
    alignment_bytes: int  # a power of two that divides each offset
    buffers_hash: str  # `Buffers.hash` of what it is a layout of
    placed_by: str = ""  # what found it

    def __post_init__(self) -> None:
        super().__post_init__()
        check_alignment(self.alignment_bytes)
        if not 0 <= self.load_bytes <= self.arena_bytes < MOST_BYTES:
            raise LayoutError(
                f"an arena of {self.arena_bytes} bytes cannot hold {self.load_bytes} live bytes"
            )

    @property
    def gap(self) -> float:
        """Bytes of the arena over the most live bytes, minus one."""
        return self.arena_bytes / self.load_bytes - 1 if self.load_bytes else 0.0

    def check_made_for(self, buffers: Buffers) -> None:
        """Raise `LayoutError` unless this is a layout of exactly these buffers."""
        if self.buffers_hash == buffers.hash:
            return
        raise LayoutError(
            "place the buffers of this step: the layout was made for another one with "
            f"{len(self.offsets_bytes)} buffers, at most {self.load_bytes} bytes live; this one "
            f"has {len(buffers)}, at most {buffers.load_bytes}, with sizes and times of its own"
        )

    def __repr__(self) -> str:
        return (
            f"Layout({len(self.offsets_bytes)} buffers in {self.arena_bytes} bytes, "
            f"{100 * self.gap:.3f} % above the most live bytes, by {self.placed_by or 'hand'})"
        )


def check_alignment(alignment_bytes: int) -> None:
    is_whole = isinstance(alignment_bytes, int)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_whole or alignment_bytes <= 0 or alignment_bytes & (alignment_bytes - 1):
        raise LayoutError(
            f"give a power of two as alignment, such as {CPU_ALIGNMENT_BYTES} for a CPU or "
            f"{ALLOCATION_BYTES} for CUDA, not {alignment_bytes!r}"
        )


def alignment_on(device: str) -> int:
    return CPU_ALIGNMENT_BYTES if device == CPU else ALLOCATION_BYTES


def check_layout(buffers: Buffers, layout: Layout) -> None:
    """Go through time with what is live by address; LayoutError names the buffers and the time."""
    layout.check_made_for(buffers)
    if len(layout.offsets_bytes) != len(buffers):
        raise LayoutError(
            f"the layout has {len(layout.offsets_bytes)} offsets for {len(buffers)} buffers"
        )
    if layout.load_bytes != buffers.load_bytes:
        raise LayoutError(
            f"the layout says that at most {layout.load_bytes} bytes are live, but "
            f"{buffers.load_bytes} are"
        )
    for i, offset in enumerate(layout.offsets_bytes):
        _check_place(buffers, layout, i, offset)
    _sweep(buffers, layout.offsets_bytes)


def _check_place(buffers: Buffers, layout: Layout, i: int, offset: int) -> None:
    top = offset + int(buffers.size_bytes[i])
    if offset % layout.alignment_bytes:
        raise LayoutError(
            f"invalid layout: {buffers.names[i]} (buffer {i}) lies at {offset}, which is not a "
            f"multiple of {layout.alignment_bytes}"
        )
    if offset < 0 or top > layout.arena_bytes:
        raise LayoutError(
            f"invalid layout: {buffers.names[i]} (buffer {i}) takes bytes {offset} to {top} of an "
            f"arena of {layout.arena_bytes}"
        )


def _sweep(buffers: Buffers, offsets: tuple[int, ...]) -> None:
    sizes = buffers.size_bytes.tolist()
    live: list[tuple[int, int, int]] = []
    for time, starts, i in _events(buffers):
        here = (offsets[i], offsets[i] + sizes[i], i)
        at = bisect.bisect_left(live, here)
        if not starts:
            del live[at]
            continue
        # Live buffers do not overlap, so a new one can only overlap its two neighbours.
        for other in live[max(at - 1, 0) : at + 1]:
            if other[0] < here[1] and here[0] < other[1]:
                raise LayoutError(
                    f"invalid layout: {buffers.names[i]} (buffer {i}, bytes {here[0]} to "
                    f"{here[1]}) overlaps {buffers.names[other[2]]} (buffer {other[2]}, bytes "
                    f"{other[0]} to {other[1]}), which is also live at time {time}"
                )
        live.insert(at, here)


def _events(buffers: Buffers) -> Iterable[tuple[int, bool, int]]:
    starts = ((int(time), True, i) for i, time in enumerate(buffers.start))
    ends = ((int(time), False, i) for i, time in enumerate(buffers.end))
    return sorted((*starts, *ends))  # `False` sorts first, so ends make room for starts
