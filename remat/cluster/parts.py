"""What a part of the model takes on one rank: a block, or what comes before or after all blocks.

A part is captured at one tensor parallel degree, context parallel degree and microbatch. All that
the planner of a cluster asks of it are two times and its options: bytes that wait for backward
against extra time. They come from the option tables of blocks (`blocks/block_options.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from remat.graph_capture.graph import TANGENTS, Floats, Op, TrainingGraph
from remat.schedules.schedule import Schedule
from remat.solver.blocks.block_options import block_options
from remat.solver.problem import Problem
from remat.solver.recompute_summary import is_product
from remat.solver.state import State

ChainPosition = str
"""A part of the chain: ``first`` comes before the blocks, ``last`` behind them; ``block`` is one of
the first kind of blocks, and ``block 1`` one of the next."""


def block_position(kind: int) -> ChainPosition:
    return f"block {kind}" if kind else "block"


# A zero-bubble schedule runs backward in two parts: I makes the gradient of the block's input,
# which the stage before waits for, and W those of the weights, where the rank would wait (Qi et al.
# 2023, https://arxiv.org/abs/2401.10241). W has the products that I does without, and what reads
# their results. All else runs with I: held for W, a sum over a batch is smaller than what it is of.
# `apply/weight_cut.py` cuts a backward graph for the fewest bytes held;
# this is that cut but for ops that make no product and copy, of which either side holds as much.


class WeightsLater(NamedTuple):
    """Of one microbatch: time of W, and bytes held from I to W."""

    weight_us: float = 0.0
    held_bytes: int = 0


def weights_later(graph: TrainingGraph, border_gradient: str) -> WeightsLater:
    """What W of a block takes, if nothing is computed again; nothing if backward is whole."""
    if not border_gradient:
        return WeightsLater()
    needed, read = set[str](), {border_gradient}
    for op in reversed(graph.ops):
        if not read.isdisjoint(op.outputs):
            needed.add(op.name)
            read.update(op.inputs)
    late, made = list[Op](), set[str]()
    for op in graph.ops[graph.n_forward :]:
        reads_late = not made.isdisjoint(op.inputs)
        if op.name not in needed and (reads_late or is_product(op.target)):
            late.append(op)
            made.update(op.outputs)
    # Inputs, such as weights, are there anyway.
    size_of = {value.name: value.size_bytes for value in graph.values if value.producer}
    held = {name for op in late for name in op.inputs if name in size_of and name not in made}
    return WeightsLater(sum(op.cost_us for op in late), sum(size_of[name] for name in held))


_LIMITS = 12  # at how many limits on its kept bytes a part is solved


class PartWork(NamedTuple):
    """Of one microbatch with nothing computed again; `weight_us` of it for gradients of weights."""

    time_us: float
    weight_us: float = 0.0


class PartOption(msgspec.Struct, frozen=True):
    """One way to run a part.

    `saved_bytes` : live from its forward to its backward, once for each microbatch in flight.
    `need_bytes` : the most that is live beside them while the part runs. `extra_us` : of what is
    computed again. `recomputed` : ops of its graph, by stage.
    """

    saved_bytes: int
    need_bytes: int
    extra_us: float
    recomputed: tuple[tuple[int, ...], ...] = ()

    def is_bettered_by(self, other: PartOption) -> bool:
        own = self.saved_bytes, self.need_bytes, self.extra_us
        its = other.saved_bytes, other.need_bytes, other.extra_us
        return own != its and all(a >= b for a, b in zip(own, its, strict=True))


class Part(msgspec.Struct, frozen=True):
    """Times of one microbatch, and options that no other betters, quickest first.

    `graph_hash` : of the graph that the options are of. `later` : of backward, what may run apart
    from the gradient of the part's input.
    """

    forward_us: float
    backward_us: float
    options: tuple[PartOption, ...]
    graph_hash: str = ""
    later: WeightsLater = WeightsLater()

    @property
    def work_us(self) -> float:
        """With nothing computed again."""
        return self.forward_us + self.backward_us

    @property
    def work(self) -> PartWork:
        return PartWork(self.work_us, self.later.weight_us)


NO_PART = Part(0.0, 0.0, (PartOption(0, 0, 0.0),))  # a part that a model does not have


def part_of(graph: TrainingGraph, border_gradient: str = "") -> Part:
    """Solve a graph of one part at several limits; `border_gradient` empty if backward is whole."""
    forward_us = sum(op.cost_us for op in graph.ops[: graph.n_forward])
    # No time limit: programs are limited by nodes, so the same graph gives the same part.
    found = block_options(graph, _LIMITS, lambda: math.inf)
    made = {name for op in graph.ops if op.target == TANGENTS for name in op.outputs}
    tangents_bytes = sum(value.size_bytes for value in graph.values if value.name in made)
    options = list[PartOption]()
    for one in found:
        # What the turn makes is there while backward runs, not while a microbatch waits for it.
        saved_bytes = one.saved_bytes - tangents_bytes
        need_bytes = int(one.live_bytes.max()) - saved_bytes
        options.append(PartOption(saved_bytes, need_bytes, one.extra_us, one.recomputed))
    kept = [o for o in options if not any(o.is_bettered_by(other) for other in options)]
    kept.sort(key=lambda option: (option.extra_us, option.saved_bytes))
    later = weights_later(graph, border_gradient)
    return Part(forward_us, graph.time_us - forward_us, tuple(kept), graph.hash, later)


def forward_part(graph: TrainingGraph) -> Part:
    """Of a part that backward does not reach: nothing before it trains, nor does anything in it."""
    whole = part_of(graph)
    least = min(whole.options, key=lambda option: option.need_bytes)
    option = PartOption(0, least.need_bytes, 0.0, least.recomputed)
    return Part(whole.forward_us, 0.0, (option,), graph.hash)


def schedule_of_option(graph: TrainingGraph, option: PartOption) -> Schedule:
    return State.from_recomputed(Problem.of(graph), option.recomputed).schedule()


# The least recomputation of n blocks in any room.
#
# A stage of a pipeline holds what its blocks save, once for each microbatch in flight, and beside
# it what one block needs while it runs:
#
#     in flight · Σ saved + max need  ≤  room
#
# For each bound on the need that matters, one table has the least extra time of n blocks that save
# no more than so many steps of a grid. Sizes are rounded up to the grid, so what a table allows
# fits. Cost: blocks x options x slots for each distinct need, in vector operations.
# Where blocks are of several kinds, a row is a number of each: their order does not matter.
# Optimal on the grid: never below the optimum, and never above that of a room which is smaller by a
# step of the grid for each block and microbatch in flight (`tests/remat/cluster`).


_SLOTS = 2048  # steps of the grid for what all blocks save together
_CLOSE_US = 1e-6  # two sums of the same times, in another order, differ by less

_Counts = npt.NDArray[np.int64]
_OfEachKind = tuple[int, ...]
"""How many blocks there are of each kind."""


class Limit(NamedTuple):
    """Room, for each row of blocks, for what so many microbatches save and one block needs.

    `in_flight` is a fraction where a rank has several virtual stages, each with a part of the
    blocks.
    """

    room_bytes: _Counts
    in_flight: float


class _Table(NamedTuple):
    """Of options that need no more: the least extra time by blocks and slots."""

    need_bytes: int
    by_counts: dict[_OfEachKind, Floats]
    least_us: Floats


class BlockTables:
    """Tables for `rows` of blocks, of kinds that have an option of `kinds` each.

    `options` : of all kinds, one after another; they are chosen by their number here.
    """

    def __init__(self, kinds: Sequence[Sequence[PartOption]], rows: Sequence[_OfEachKind]) -> None:
        self.kinds, self.rows = tuple(map(tuple, kinds)), tuple(rows)
        self.options = tuple(option for options in self.kinds for option in options)
        self.begins = tuple(accumulate(map(len, self.kinds), initial=0))
        most = [max(counts) for counts in zip(*self.rows, strict=True)]
        of_kind = [max((one.saved_bytes for one in options), default=0) for options in self.kinds]
        largest = sum(n * size for n, size in zip(most, of_kind, strict=True))
        self.unit_bytes = max(-(-largest // _SLOTS), 1)
        # Rounded up, so that what a table allows fits.
        self.steps = [-(-option.saved_bytes // self.unit_bytes) for option in self.options]
        widest = [max(self.steps[a:b], default=0) for a, b in pairwise(self.begins)]
        self.width = sum(n * step for n, step in zip(most, widest, strict=True)) + 1
        self.sizes = np.array([sum(row) for row in self.rows])

    @cached_property
    def tables(self) -> list[_Table]:
        """Of each distinct need, ascending."""
        needs = sorted({option.need_bytes for option in self.options})
        return [self._table(need) for need in needs]

    def _table(self, need_bytes: int) -> _Table:
        known = {(0,) * len(self.kinds): np.zeros(self.width)}
        for row in self.rows:
            lacking, counts = list[_OfEachKind](), row
            while counts not in known:
                lacking.append(counts)
                counts = _one_less(counts)[1]
            for counts in reversed(lacking):
                known[counts] = self._with_one_more(counts, need_bytes, known)
        return _Table(need_bytes, known, np.array([known[row] for row in self.rows]))

    def _with_one_more(
        self, counts: _OfEachKind, need_bytes: int, known: dict[_OfEachKind, Floats]
    ) -> Floats:
        kind, fewer = _one_less(counts)
        least, made = known[fewer], np.full(self.width, np.inf)
        for i in self._numbers(kind):
            option, step = self.options[i], self.steps[i]
            if option.need_bytes <= need_bytes:
                reached = least[: self.width - step] + option.extra_us
                np.minimum(made[step:], reached, out=made[step:])
        return made

    def _numbers(self, kind: int) -> range:
        """Of the options of a kind."""
        return range(self.begins[kind], self.begins[kind + 1])

    def least_us(self, rows: _Counts, limits: Sequence[Limit], beside_bytes: int = 0) -> Floats:
        """For each row, by its number: the least extra time of one microbatch.

        `beside_bytes` : what something else needs at times beside all that blocks save.
        """
        out = np.full(rows.shape, np.inf)
        for one in self.tables:
            slot = self._slots(limits, max(one.need_bytes, beside_bytes))
            fits = slot >= 0
            out[fits] = np.minimum(out[fits], one.least_us[rows[fits], slot[fits]])
        is_enough = np.all([limit.room_bytes >= beside_bytes for limit in limits], axis=0)
        # A stage without blocks needs room for its ends alone.
        return np.where((self.sizes[rows] == 0) & is_enough, 0.0, out)

    def chosen(self, row: int, limits: Sequence[Limit], beside_bytes: int = 0) -> dict[int, int]:
        """How many blocks of a row take which option; `ValueError` where nothing fits."""
        counts, count = self.rows[row], Counter[int]()
        if not any(counts):
            return {}
        table, slot = self._best_table(row, limits, beside_bytes)
        # Back through the table, by the first option that gives its entry.
        while any(counts):
            kind, fewer = _one_less(counts)
            least, least_us = table.by_counts[fewer], table.by_counts[counts][slot]
            i = next(
                i
                for i in self._numbers(kind)
                if self.options[i].need_bytes <= table.need_bytes and self.steps[i] <= slot
                if abs(least[slot - self.steps[i]] + self.options[i].extra_us - least_us)
                < _CLOSE_US
            )
            count[i] += 1
            slot, counts = slot - self.steps[i], fewer
        return dict(sorted(count.items()))

    def _best_table(
        self, row: int, limits: Sequence[Limit], beside_bytes: int
    ) -> tuple[_Table, int]:
        best: tuple[float, _Table, int] | None = None
        for one in self.tables:
            slot = int(self._slots(limits, max(one.need_bytes, beside_bytes))[0])
            # Needs ascend: of tables as quick, the one of the least need stays.
            if slot >= 0 and (best is None or one.least_us[row, slot] < best[0] - _CLOSE_US):
                best = float(one.least_us[row, slot]), one, slot
        if best is None or not np.isfinite(best[0]):
            rooms = " and ".join(str(int(limit.room_bytes[0])) for limit in limits)
            raise ValueError(f"{self.sizes[row]} blocks do not fit {rooms} bytes")
        return best[1:]

    def _slots(self, limits: Sequence[Limit], need_bytes: int) -> _Counts:
        """What all blocks may save together, in steps of the grid; -1 where there is no room."""
        found = [
            np.floor_divide(limit.room_bytes - need_bytes, limit.in_flight * self.unit_bytes)
            for limit in limits
        ]
        return np.clip(np.min(found, axis=0), -1, self.width - 1).astype(np.int64)


def _one_less(counts: _OfEachKind) -> tuple[int, _OfEachKind]:
    """The last kind that has any, and the counts with one less of it."""
    kind = max(i for i, n in enumerate(counts) if n)
    return kind, (*counts[:kind], counts[kind] - 1, *counts[kind + 1 :])


class EqualBlocks(BlockTables):
    """Tables for up to `most` blocks that share `options`; row n has n of them."""

    def __init__(self, options: Sequence[PartOption], most: int) -> None:
        super().__init__((options,), [(n,) for n in range(most + 1)])


class BlockRows:
    """Which `counts` a chain's stages may have of each kind, by the number of a row.

    `kinds` : of each block in turn; they are numbered from 0. `layouts` : ranges of blocks, each of
    a rank's virtual stages, that have a row besides all runs of blocks.
    """

    def __init__(self, kinds: Sequence[int], layouts: Iterable[Sequence[range]] = ()) -> None:
        n, self.kinds = len(kinds), max(kinds) + 1
        one_hot = np.eye(self.kinds, dtype=np.int64)[list(kinds)]
        self._before = np.vstack([np.zeros_like(one_hot[:1]), one_hot.cumsum(axis=0)])
        number: dict[_OfEachKind, int] = {}
        # By size, so that of one kind row n has n blocks.
        begins = [range(n - size + 1 if self.kinds > 1 else 1) for size in range(n + 1)]
        runs = [(range(a, a + size),) for size in range(n + 1) for a in begins[size]]
        for ranges in (*runs, *layouts):
            number.setdefault(self._counts(ranges), len(number))
        self._number = number
        self.counts = np.array(list(number))
        self.sizes = self.counts.sum(axis=1)
        # Of several kinds, the row of the run of so many blocks (column) from each one on; where
        # there is none, one row too many.
        self.of_run = np.full((n + 1, n + 1), len(number))
        for (run,) in runs:
            self.of_run[run.start, len(run)] = self.of((run,))

    def _counts(self, ranges: Sequence[range]) -> _OfEachKind:
        found = sum((self._before[r.stop] - self._before[r.start] for r in ranges), start=0)
        return tuple(np.atleast_1d(found).tolist())

    def of(self, ranges: Sequence[range]) -> int:
        """The number of the row of these blocks."""
        return self._number[self._counts(ranges)]

    def tables(self, parts: Sequence[Part]) -> BlockTables:
        """With `parts` of each kind."""
        return BlockTables([part.options for part in parts], list(self._number))
