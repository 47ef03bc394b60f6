"""A schedule as it runs: when each op runs, how much is live meanwhile, which values are there.

All that draws or exports a schedule reads a `Timeline`, whose figures are those of `simulate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from remat.graph_capture.graph import Floats, Ints, Op, TrainingGraph
from remat.schedules.derived import graph_of_schedule
from remat.schedules.kept_in_forward import end_of_forward
from remat.schedules.schedule import Compute, Schedule, arriving_values, freed_value
from remat.schedules.simulate import Simulation, simulate


@dataclass(frozen=True)
class _Residence:
    """A value is on the device from run `begin` to before run `end`."""

    value: str
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """The runs of a schedule in order. Each array has one entry a run."""

    graph: TrainingGraph
    schedule: Schedule
    simulation: Simulation
    steps: Ints  # indices into those of the schedule
    ops: Ints  # indices into those of the graph
    start_us: Floats
    live_bytes: Ints
    again: NDArray[np.bool_]  # whether the op has run before

    def __len__(self) -> int:
        return len(self.steps)

    def op_of(self, run: int) -> Op:
        return self.graph.ops[int(self.ops[run])]

    @property
    def is_timed(self) -> bool:
        return self.simulation.time_us > 0

    @cached_property
    def edges(self) -> Floats:
        """Where runs begin, and where the last ends, [runs + 1]: in ms; without costs in runs."""
        if not self.is_timed:
            return np.arange(len(self) + 1, dtype=np.float64)
        return np.append(self.start_us, self.simulation.time_us) / 1e3

    def stretched(self, moments: Floats) -> Floats:
        """Moments of a real step, from 0 to its end, on the axis of `edges`."""
        return moments * (self.edges[-1] / moments[-1])

    @property
    def axis_title(self) -> str:
        return "time in the step (ms)" if self.is_timed else "runs of ops"

    @cached_property
    def peak_run(self) -> int:
        # A fetch may reach the peak: the run before it counts.
        return max(int(np.searchsorted(self.steps, self.simulation.peak_step, "right")) - 1, 0)

    @cached_property
    def forward_runs(self) -> int:
        end = end_of_forward(self.graph, self.schedule)
        return len(self) if end is None else int(np.searchsorted(self.steps, end))

    @cached_property
    def residences(self) -> tuple[_Residence, ...]:
        """Each stay of each value on the device, in the order of their ends."""
        found, since = list[_Residence](), dict[str, int]()
        run = 0
        for step in self.schedule.steps:
            # A live value keeps its first copy.
            since |= {name: run for name in arriving_values(self.graph, step) if name not in since}
            run += isinstance(step, Compute)
            if gone := freed_value(step):
                found.append(_Residence(gone, since.pop(gone), run))
        found += [_Residence(name, begin, run) for name, begin in since.items()]
        return tuple(found)


def timeline(graph: TrainingGraph, schedule: Schedule) -> Timeline:
    graph = graph_of_schedule(graph, schedule)
    simulation = simulate(graph, schedule)
    runs = [(i, step.op) for i, step in enumerate(schedule.steps) if isinstance(step, Compute)]
    steps = np.array([i for i, _ in runs], dtype=np.int64)
    ops = np.array([graph.op_index[name] for _, name in runs], dtype=np.int64)
    again = np.ones(len(ops), dtype=np.bool_)
    again[np.unique(ops, return_index=True)[1]] = False  # `unique` returns the first run of each op
    before_us = np.concatenate([[0.0], simulation.clock_us])[steps]
    waits_us = np.zeros(len(schedule.steps))  # the clock leaves out the waits for inputs
    for stall in simulation.stalls:
        waits_us[stall.step] += stall.us
    start_us = before_us + waits_us[steps]
    live_bytes = np.array(simulation.live_bytes, dtype=np.int64)[steps]
    return Timeline(graph, schedule, simulation, steps, ops, start_us, live_bytes, again)


OUTSIDE = "(outside modules)"
FEW, MANY = 4, 150  # rows: fewer say little, more cannot be told apart


def layer_of(module: str) -> str:
    """The path up to its first index: ``blocks.3`` of ``blocks.3.attn.qkv``."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return module or OUTSIDE


def place_of(module: str) -> str:
    """The place in any layer: ``blocks.*.attn`` of ``blocks.3.attn.qkv``."""
    parts = ["*" if part.isdigit() else part for part in module.split(".")]
    end = parts.index("*") + 2 if "*" in parts else len(parts)
    return ".".join(parts[:end]) or OUTSIDE


def rows_of_ops(graph: TrainingGraph) -> tuple[tuple[str, ...], tuple[int, ...]]:
    modules = [op.module for op in graph.ops]
    # From layers to modules to forward ops, if there are too few rows.
    for names in ([layer_of(one) for one in modules], [one or OUTSIDE for one in modules]):
        titles = list(dict.fromkeys(names))
        if len(titles) >= FEW:
            return _merged(titles, [titles.index(name) for name in names])
    producer = {v: i for i, op in enumerate(graph.ops[: graph.n_forward]) for v in op.outputs}
    rows: list[int] = []
    for i, op in enumerate(graph.ops):
        read = [producer[name] for name in op.inputs if name in producer]
        # A backward op joins the last forward value that it reads.
        rows.append(i if i < graph.n_forward else max(read, default=rows[-1] if rows else 0))
    return _merged([op.name for op in graph.ops[: max(graph.n_forward, 1)]], rows)


def _merged(titles: Sequence[str], rows: Sequence[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if (size := -(-len(titles) // MANY)) <= 1:
        return tuple(titles), tuple(rows)
    firsts = range(0, len(titles), size)
    lasts = [min(first + size, len(titles)) - 1 for first in firsts]
    merged = [
        titles[first] if first == last else f"{titles[first]} to {titles[last]}"
        for first, last in zip(firsts, lasts, strict=True)
    ]
    return tuple(merged), tuple(row // size for row in rows)


BandsBy = Literal["kind", "module"]

RESIDENT, WORKSPACE, OTHERS = "resident", "workspace", "others"
_MOST = 6  # how many modules have a band of their own: as many as the palette has colours for


def live_bands(line: Timeline, by: BandsBy = "kind") -> dict[str, Ints]:
    """Bytes live during each run, [runs], by name; they sum to `line.live_bytes`.

    ``resident`` comes first, ``workspace`` last, with second copies of values made again. Between
    them are the kinds of values, or the modules that make them, largest first.
    """
    group_of = _groups(line.graph, by)
    groups = list(dict.fromkeys(group_of[stay.value] for stay in line.residences))
    rows = {name: groups.index(group) for name, group in group_of.items() if group in groups}
    curves = dict(zip(groups, _held_bytes(line, rows, len(groups)), strict=True))
    resident = np.full(len(line), line.graph.resident.total_bytes, dtype=np.int64)
    held = sum(curves.values(), resident)
    ranked = sorted(curves, key=lambda name: -int(curves[name].sum()))
    bands = {RESIDENT: resident} | {name: curves[name] for name in ranked[:_MOST]}
    if ranked[_MOST:]:
        bands[OTHERS] = sum((curves[name] for name in ranked[_MOST:]), np.zeros_like(resident))
    # The remainder, so that bands sum to the simulator's bytes.
    return bands | {WORKSPACE: line.live_bytes - held}


def _groups(graph: TrainingGraph, by: BandsBy) -> Mapping[str, str]:
    made = [value for value in graph.values if value.producer]
    if by == "kind":
        return {value.name: value.kind for value in made}
    module = {op.name: op.module for op in graph.ops}
    return {value.name: place_of(module[value.producer]) for value in made}


def _held_bytes(line: Timeline, row_of: Mapping[str, int], n_rows: int) -> Ints:
    """Bytes of values that each row holds during each run, [rows, runs]."""
    change = np.zeros((n_rows, len(line) + 1), dtype=np.int64)
    for stay in line.residences:
        if (row := row_of.get(stay.value)) is not None:
            size_bytes = line.graph.value_by_name[stay.value].size_bytes
            change[row, stay.begin] += size_bytes
            change[row, stay.end] -= size_bytes
    return np.cumsum(change, axis=1)[:, :-1]


# The schedule as Checkmate draws it: what runs when (R), what is kept when (S). Here a row is a
# layer and a column a run: a step of thousands of ops fits. A row is no mean of its ops.
# P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", 2020.


@dataclass(frozen=True)
class Span:
    """In row `row`, from run `begin` to before run `end`."""

    row: int
    begin: int
    end: int


@dataclass(frozen=True)
class _Ribbon:
    titles: tuple[str, ...]
    forward: tuple[Span, ...]
    backward: tuple[Span, ...]
    recompute: tuple[Span, ...]
    holds: tuple[Span, ...]  # a forward value of the row is live
    holds_most: tuple[Span, ...]  # these have at least half of the most that the row ever holds


def ribbon(line: Timeline) -> _Ribbon:
    titles, row_of_op = rows_of_ops(line.graph)
    rows = np.array(row_of_op, dtype=np.int64)[line.ops]
    is_forward = line.ops < line.graph.n_forward
    forward = zip(row_of_op, line.graph.ops[: line.graph.n_forward], strict=False)
    row_of = {name: row for row, op in forward for name in op.outputs}
    held = _held_bytes(line, row_of, len(titles))
    most = held.max(axis=1, keepdims=True, initial=0)
    return _Ribbon(
        titles=titles,
        forward=_spans_of_runs(rows, is_forward & ~line.again),
        backward=_spans_of_runs(rows, ~is_forward & ~line.again),
        recompute=_spans_of_runs(rows, line.again),
        holds=_spans_of_mask(held > 0),
        holds_most=_spans_of_mask((held > 0) & (2 * held >= most)),  # empty rows are left out
    )


def _spans_of_runs(rows: Ints, chosen: NDArray[np.bool_]) -> tuple[Span, ...]:
    spans: list[Span] = []
    for run in np.flatnonzero(chosen).tolist():
        row = int(rows[run])
        if spans and spans[-1].row == row and spans[-1].end == run:
            spans[-1] = Span(row, spans[-1].begin, run + 1)
        else:
            spans.append(Span(row, run, run + 1))
    return tuple(spans)


def _spans_of_mask(mask: NDArray[np.bool_]) -> tuple[Span, ...]:
    # Padded, so that spans at either end have two edges.
    edges = np.diff(np.pad(mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    spans: list[Span] = []
    for row, edge in enumerate(edges):
        begins, ends = np.flatnonzero(edge == 1), np.flatnonzero(edge == -1)
        spans += [Span(row, int(b), int(e)) for b, e in zip(begins, ends, strict=True)]
    return tuple(spans)
