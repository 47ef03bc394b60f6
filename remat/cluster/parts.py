"""What a part of the model takes on one rank: a block, or what comes before or after all blocks.

A part is captured at one tensor parallel degree, context parallel degree and microbatch. All that
the planner of a cluster asks of it are two times and its options: bytes that wait for backward
against extra time. They come from the option tables of blocks (`blocks/block_options.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from remat.graph_capture.graph import TANGENTS, Floats, Op, TrainingGraph
from remat.schedules.schedule import Schedule
from remat.solver.blocks.block_options import block_options
from remat.solver.problem import Problem
from remat.solver.recompute_summary import is_product
from remat.solver.state import State

ChainPosition = Literal["first", "block", "last"]
"""A part of the chain: what comes before the blocks, one of them, and what comes behind them."""
CHAIN_POSITIONS: tuple[ChainPosition, ...] = ("first", "block", "last")


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


def schedule_of_option(graph: TrainingGraph, option: PartOption) -> Schedule:
    return State.from_recomputed(Problem.of(graph), option.recomputed).schedule()


# The least recomputation of n equal blocks in any room.
#
# A stage of a pipeline holds what its blocks save, once for each microbatch in flight, and beside
# it what one block needs while it runs:
#
#     in flight · Σ saved + max need  ≤  room
#
# For each bound on the need that matters, one table has the least extra time of n blocks that save
# no more than so many steps of a grid. Sizes are rounded up to the grid, so what a table allows
# fits. Cost: blocks x options x slots for each distinct need, in vector operations.
# Optimal on the grid: never below the optimum, and never above that of a room which is smaller by a
# step of the grid for each block and microbatch in flight (`tests/remat/cluster`).


_SLOTS = 2048  # steps of the grid for what all blocks save together
_CLOSE_US = 1e-6  # two sums of the same times, in another order, differ by less

_Counts = npt.NDArray[np.int64]


class Limit(NamedTuple):
    """Room, for each number of blocks, for what so many microbatches save and one block needs.

    `in_flight` is a fraction where a rank has several virtual stages, each with a part of the
    blocks.
    """

    room_bytes: _Counts
    in_flight: float


class EqualBlocks:
    """Tables for up to `most` blocks that share `options`."""

    def __init__(self, options: Sequence[PartOption], most: int) -> None:
        self.options, self.most = tuple(options), most
        largest = max((option.saved_bytes for option in self.options), default=0)
        self.unit_bytes = max(-(-largest * most // _SLOTS), 1)
        # Rounded up, so that what a table allows fits.
        self.steps = [-(-option.saved_bytes // self.unit_bytes) for option in self.options]
        self.width = max(self.steps, default=0) * most + 1

    @cached_property
    def tables(self) -> list[tuple[int, Floats]]:
        """Each distinct need, ascending, with the table of options that need no more."""
        needs = sorted({option.need_bytes for option in self.options})
        return [(need, self._least_us(need)) for need in needs]

    def _least_us(self, need_bytes: int) -> Floats:
        """Least extra time by blocks (row) and slots (column)."""
        least = np.full((self.most + 1, self.width), np.inf)
        least[0] = 0.0
        for n in range(1, self.most + 1):
            for option, step in zip(self.options, self.steps, strict=True):
                if option.need_bytes <= need_bytes:
                    reached = least[n - 1, : self.width - step] + option.extra_us
                    np.minimum(least[n, step:], reached, out=least[n, step:])
        return least

    def least_us(self, blocks: _Counts, limits: Sequence[Limit], beside_bytes: int = 0) -> Floats:
        """For each number of blocks: the least extra time of one microbatch.

        `beside_bytes` : what something else needs at times beside all that blocks save.
        """
        out = np.full(blocks.shape, np.inf)
        for need_bytes, least in self.tables:
            slot = self._slots(limits, max(need_bytes, beside_bytes))
            fits = slot >= 0
            out[fits] = np.minimum(out[fits], least[blocks[fits], slot[fits]])
        is_enough = np.all([limit.room_bytes >= beside_bytes for limit in limits], axis=0)
        # A stage without blocks needs room for its ends alone.
        return np.where((blocks == 0) & is_enough, 0.0, out)

    def chosen(self, blocks: int, limits: Sequence[Limit], beside_bytes: int = 0) -> dict[int, int]:
        """How many blocks take which option; `ValueError` where nothing fits."""
        if not blocks:
            return {}
        need_bytes, least, slot = self._best_table(blocks, limits, beside_bytes)
        count = Counter[int]()
        # Back through the table, by the first option that gives its entry.
        for n in range(blocks, 0, -1):
            i = next(
                i
                for i, (option, step) in enumerate(zip(self.options, self.steps, strict=True))
                if option.need_bytes <= need_bytes and step <= slot
                if abs(least[n - 1, slot - step] + option.extra_us - least[n, slot]) < _CLOSE_US
            )
            count[i] += 1
            slot -= self.steps[i]
        return dict(sorted(count.items()))

    def _best_table(
        self, blocks: int, limits: Sequence[Limit], beside_bytes: int
    ) -> tuple[int, Floats, int]:
        best: tuple[float, int, Floats, int] | None = None
        for need_bytes, least in self.tables:
            slot = int(self._slots(limits, max(need_bytes, beside_bytes))[0])
            # Needs ascend: of tables as quick, the one of the least need stays.
            if slot >= 0 and (best is None or least[blocks, slot] < best[0] - _CLOSE_US):
                best = float(least[blocks, slot]), need_bytes, least, slot
        if best is None or not np.isfinite(best[0]):
            rooms = " and ".join(str(int(limit.room_bytes[0])) for limit in limits)
            raise ValueError(f"{blocks} blocks do not fit {rooms} bytes")
        return best[1:]

    def _slots(self, limits: Sequence[Limit], need_bytes: int) -> _Counts:
        """What all blocks may save together, in steps of the grid; -1 where there is no room."""
        found = [
            np.floor_divide(limit.room_bytes - need_bytes, limit.in_flight * self.unit_bytes)
            for limit in limits
        ]
        return np.clip(np.min(found, axis=0), -1, self.width - 1).astype(np.int64)
