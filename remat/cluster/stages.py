"""One stage of a mesh, for every row of blocks: its room, and the least it takes.

The room of a stage is the budget less what its states and borders hold. What the ends of the model
save and need comes off it for each of their options; blocks share the rest. With as many blocks,
less recomputation is better for the sum of all stages and for the slowest one, so the choice inside
a stage does not depend on the others.

Where the gradients of weights are made apart, what they need is held beside (`parts.py`).
While a block's inputs get their gradient, its own share of that is held too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from remat.cluster.mesh import Cluster, Degrees, Job, Mesh, Weights
from remat.cluster.parts import NO_PART, BlockRows, BlockTables, Limit, Part, PartOption
from remat.cluster.pipeline_replay import FOR_WEIGHTS, RUNNING, SAVED_ACTIVATIONS, STANDING
from remat.graph_capture.graph import Floats

# What a stage holds beside activations, by holder: states and buffers of its border.
#
# Of mixed precision as torchtitan trains: parameters P and activations in bfloat16, gradients G,
# masters and two moments (OS) in float32. With FSDP2, P at rest are the masters. ψ are a rank's
# parameters, S the ranks of a shard group:
#
#     OS and masters  12 ψ / S        P  2 ψ / keep, and what is gathered and copied for one block
#     G  4 ψ, or 4 ψ / S if reduced for each microbatch, and what one block's reduction copies
#     frozen parameters  P alone, and what rests of them in shards where P is kept over fewer ranks
#     borders  a receive buffer each way for each microbatch, one gradient on its way, one output
#
# Sources: ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054); FSDP2's buffers as
# measured on CPU ranks. Not counted: temporaries of the optimizer's step.


_Counts = npt.NDArray[np.int64]

_STATE_BYTES, _WEIGHT_BYTES, _GRADIENT_BYTES = 12, 2, 4
"""Of one parameter: master and two moments in float32; in bfloat16; its float32 gradient."""


class _StageParameters(NamedTuple):
    """Elements that one rank has: of all, and of those that train."""

    all: _Counts
    trained: _Counts


def stage_parameters(
    job: Job, tp: int, counts: _Counts, *, first: bool, last: bool
) -> _StageParameters:
    """Of a stage with so many blocks of each kind, by row."""
    ends = [job.weights[place] for place, has in (("first", first), ("last", last)) if has]
    blocks = [job.weights[place] for place in job.block_positions]
    every = counts @ [w.on_rank(tp) for w in blocks] + sum(w.on_rank(tp) for w in ends)
    trained = counts @ [w.trained_on_rank(tp) for w in blocks]
    return _StageParameters(every, trained + sum(w.trained_on_rank(tp) for w in ends))


def least_states_bytes(job: Job, mesh: Mesh) -> float:
    """Of the stage that holds most of P, G and OS, at least; without buffers and activations."""
    counts = np.bincount(job.kind_of_layer)
    whole = stage_parameters(job, mesh.degrees.tp, counts, first=True, last=True)
    split = mesh.shard if mesh.reduce_each else 1
    of_trained = _STATE_BYTES / mesh.shard + _GRADIENT_BYTES / split
    found = of_trained * float(whole.trained) + _WEIGHT_BYTES / mesh.keep * float(whole.all)
    # No cut gives each stage less than the mean.
    return found / mesh.degrees.pp


def border_bytes(job: Job, degrees: Degrees) -> int:
    """Of what one rank sends for a microbatch."""
    # Tensor parallel ranks split the sequence too.
    return degrees.microbatch * job.border_bytes // (degrees.tp * degrees.cp)


# How many microbatches are in flight on a stage: their saved bytes are live at once.
#
# Sources: PipeDream-Flush, called 1F1B (Narayanan et al. 2021, https://arxiv.org/abs/2006.09503),
# its interleaved form with several virtual stages a rank (Narayanan et al. 2021,
# https://arxiv.org/abs/2104.04473), and that with gradients of weights apart, ZB1P (Qi et al. 2023,
# https://arxiv.org/abs/2401.10241). `tests/remat/cluster` replays torch's own action lists and
# finds the same counts.


class _Flight(NamedTuple):
    """Microbatches of all of a rank's blocks: `saved` until I, `waiting` for W."""

    saved: float
    waiting: float = 0.0


def forwards_in_flight(stage: int, d: Degrees) -> int:
    """Forwards of virtual stages that a rank has open at most."""
    behind = d.pp - 1 - stage
    if d.virtual_stages == 1 and not d.is_split:
        return min(d.microbatches, behind + 1)
    # Torch's own number of warm-up forwards.
    warm = (1 if d.is_split else 2) * behind + (d.virtual_stages - 1) * d.pp
    return min(d.microbatches * d.virtual_stages, warm + 1)


def flights(stage: int, d: Degrees) -> tuple[_Flight, ...]:
    """Any of which may hold the most: while a forward runs, and after the next backward."""
    opened, v = forwards_in_flight(stage, d), d.virtual_stages
    if not d.is_split:
        return (_Flight(opened / v),)
    waiting = min(stage, d.microbatches * v - opened)
    return _Flight(opened / v, waiting / v), _Flight((opened - 1) / v, (waiting + 1) / v)


class StagePlan(msgspec.Struct, frozen=True):
    """A stage as planned.

    `in_flight` : microbatches whose saved bytes are live at once. `options` : how many blocks take
    which option of the block. `first`, `last` : options of the ends, where the stage has them.
    `work_us`, `extra_us` : of one microbatch, without and for what is computed again.
    `saved_bytes` : of one microbatch in flight. `held_bytes` : by holder.
    """

    blocks: int
    in_flight: float
    options: dict[int, int]
    first: int | None
    last: int | None
    work_us: float
    extra_us: float
    saved_bytes: int
    held_bytes: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return sum(self.held_bytes.values())

    @property
    def overhead(self) -> float:
        return self.extra_us / self.work_us if self.work_us else 0.0


class StageTable:
    """What stage `index` of a mesh takes for each row of blocks.

    `parts` are first, of each kind of block, and last; `table` is of the blocks' options.
    `extra_us` is of one microbatch, inf where it does not fit; `picks` says which pair of the ends'
    options it is with.
    """

    def __init__(
        self, job: Job, cluster: Cluster, mesh: Mesh, index: int, parts: tuple[Part, ...],
        rows: BlockRows, table: BlockTables,
    ) -> None:  # fmt: skip
        first, *blocks, last = parts
        self.mesh, self.index, self.blocks, self.table = mesh, index, tuple(blocks), table
        self.job, self.cluster, self.counts = job, cluster, rows.counts
        self.is_first, self.is_last = index == 0, index == mesh.degrees.pp - 1
        self.opened = forwards_in_flight(index, mesh.degrees)
        self.ends = first if self.is_first else NO_PART, last if self.is_last else NO_PART
        numbers = np.arange(len(self.counts))
        self.held = self._bytes_by_holder()
        self.room_bytes = cluster.budget_bytes - sum(self.held.values(), np.zeros_like(numbers))
        # What the ends save and need comes off the blocks' room, so each pair of their options is
        # tried.
        self.pairs = list(product(self.ends[0].options, self.ends[1].options))
        self.extra_us, self.picks = np.full(numbers.shape, np.inf), np.zeros_like(numbers)
        for pick, (first, last) in enumerate(self.pairs):
            limits = self._limits(numbers, self._saved_by(first, last))
            beside = max(first.need_bytes, last.need_bytes)
            found = table.least_us(numbers, limits, beside) + first.extra_us + last.extra_us
            better = found < self.extra_us
            self.extra_us[better], self.picks[better] = found[better], pick

    @property
    def work_us(self) -> Floats:
        """Of one microbatch, by row."""
        return self._of_blocks("work_us") + sum(end.work_us for end in self.ends)

    def _of_blocks(self, name: str) -> Floats:
        """The sum of a time of blocks, by row."""
        return self.counts @ np.array([getattr(part, name) for part in self.blocks])

    @property
    def times_us(self) -> Floats:
        return self.work_us + self.extra_us

    def fill_us(self, row: int, wait_us: float) -> float:
        """What one microbatch takes of the bubble: the stage's own time (Narayanan et al. 2021)."""
        time_us = float(self.times_us[row]) + wait_us
        if not self.mesh.degrees.is_split or not math.isfinite(time_us):
            return time_us
        weight_us = float(self.counts[row] @ [part.later.weight_us for part in self.blocks])
        ends_us = sum(end.forward_us for end in self.ends)
        forward_us = float(self._of_blocks("forward_us")[row]) + ends_us + wait_us / 2
        input_us = time_us - forward_us - weight_us
        # W fills the bubble as far as a forward or an I is as long: f + i - min(f, i, w).
        return forward_us + input_us - min(forward_us, input_us, weight_us)

    def stage(self, row: int) -> StagePlan:
        first, last = self.pairs[int(self.picks[row])]
        by_ends = self._saved_by(first, last)
        limits = self._limits(np.array([row]), by_ends)
        options = self.table.chosen(row, limits, max(first.need_bytes, last.need_bytes))
        chosen = [self.table.options[i] for i in options]
        by_blocks = sum(o.saved_bytes * n for o, n in zip(chosen, options.values(), strict=True))
        need = max((o.need_bytes for o in (*chosen, first, last)), default=0)
        held = {name: int(sizes[row]) for name, sizes in self.held.items()}
        later_bytes = int(self.counts[row] @ [part.later.held_bytes for part in self.blocks])
        # Where so many blocks, which save so much together, hold the most.
        fullest = max(
            flights(self.index, self.mesh.degrees),
            key=lambda one: one.saved * by_blocks + one.waiting * later_bytes,
        )
        if self.mesh.degrees.is_split:
            held[FOR_WEIGHTS] = int(self._waiting_bytes(fullest, np.array([row]))[0])
        return StagePlan(
            int(self.counts[row].sum()), fullest.saved, options,
            self.ends[0].options.index(first) if self.ends[0] is not NO_PART else None,
            self.ends[1].options.index(last) if self.ends[1] is not NO_PART else None,
            float(self.work_us[row]), float(self.extra_us[row]), by_blocks,
            held | {SAVED_ACTIVATIONS: int(fullest.saved * by_blocks) + by_ends, RUNNING: need},
        )  # fmt: skip

    def _bytes_by_holder(self) -> dict[str, _Counts]:
        tp, shard, keep = self.mesh.degrees.tp, self.mesh.shard, self.mesh.keep
        parameters, trained = stage_parameters(
            self.job, tp, self.counts, first=self.is_first, last=self.is_last
        )
        of_block = [self.job.weights[place] for place in self.job.block_positions]
        buffers = reduced = 0
        if keep > 1 or shard > 1:
            buffers = 2 * _WEIGHT_BYTES * max(weights.on_rank(tp) for weights in of_block)
        if shard > 1:
            reduced = _GRADIENT_BYTES * max(weights.trained_on_rank(tp) for weights in of_block)
        split = shard if self.mesh.reduce_each else 1
        # Frozen parameters have no masters that they rest in.
        at_rest = (parameters - trained) // shard if shard > keep else 0
        sizes = (
            _STATE_BYTES * trained // shard,
            _WEIGHT_BYTES * parameters // keep + _WEIGHT_BYTES * at_rest + buffers,
            _GRADIENT_BYTES * trained // split + reduced,
            np.zeros_like(parameters) + self._border_buffers(),
        )
        return dict(zip(STANDING, sizes, strict=True))

    def _border_buffers(self) -> int:
        degrees, has_ring = self.mesh.degrees, self.cluster.receive_ring
        if degrees.pp == 1:
            return 0
        all_of = degrees.microbatches * degrees.virtual_stages
        of_gradients = self.opened if has_ring else all_of
        # A received input in flight is what the stage's first block saves, and counted there.
        of_inputs = 0 if has_ring else all_of - self.opened
        ends = degrees.virtual_stages > 1  # each rank then receives on both sides, but at one end
        takes_inputs, takes_gradients = not self.is_first or ends, not self.is_last or ends
        slots = of_inputs * takes_inputs + of_gradients * takes_gradients
        return border_bytes(self.job, degrees) * (slots + 2)

    def _limits(self, rows: _Counts, by_ends: int) -> list[Limit]:
        """Room for what so many blocks save, at each moment that may hold the most."""
        left, is_split = self.room_bytes[rows] - by_ends, self.mesh.degrees.is_split
        return [
            Limit(left - self._waiting_bytes(one, rows) * is_split, one.saved)
            for one in flights(self.index, self.mesh.degrees)
        ]

    def _waiting_bytes(self, flight: _Flight, rows: _Counts) -> _Counts:
        """Held for gradients of weights: of all that wait, and of the block that runs."""
        later = [part.later.held_bytes for part in self.blocks]
        return np.ceil(flight.waiting * (self.counts[rows] @ later)).astype(np.int64) + max(later)

    def _saved_by(self, first: PartOption, last: PartOption) -> int:
        """Bytes of the ends, over all microbatches in flight."""
        of_first = min(self.mesh.degrees.microbatches, self.opened)
        # Behind the last virtual stage backward begins at once.
        return of_first * first.saved_bytes + last.saved_bytes


# Times of what a mesh adds to its parts: gathers, reductions, waits between stages, updates.
#
# FSDP2 gathers the next block beside the one that runs, and reduces beside backward. What runs
# beside a collective is slowed (`RankLinks.both_us`). The first gather and the last reduction have
# nothing beside them. Inside of a pipeline all reductions come at its end, in torch's own loops.


_UPDATE_BYTES = 28
"""Moved for a parameter's AdamW step: master and moments read and written, its gradient read."""


class _UnitTimes(msgspec.Struct, frozen=True):
    """Collectives of the states of one unit of FSDP2.

    `again_us` : to gather for backward. `scatter_us` : within a shard group. `reduce_us` : that,
    and over the replicas too.
    """

    gather_us: float
    again_us: float
    scatter_us: float
    reduce_us: float


def _unit_times(cluster: Cluster, mesh: Mesh, *of_unit: Weights) -> _UnitTimes:
    """Of a unit with these parameters."""
    links, tp, shard = cluster.links, mesh.degrees.tp, mesh.shard
    weights = _WEIGHT_BYTES * sum(one.on_rank(tp) for one in of_unit)
    gradients = _GRADIENT_BYTES * sum(one.trained_on_rank(tp) for one in of_unit)
    # hpZ: from forward to backward, shards lie over fewer ranks.
    over = mesh.keep if mesh.keep < shard else shard
    again_us = 0.0 if mesh.keep == 1 else links.us("all_gather", weights, over, tp)
    scatter_us = links.us("reduce_scatter", gradients, shard, tp)
    over_replicas = links.us("all_reduce", gradients / shard, mesh.replicas, tp * shard)
    gather_us = links.us("all_gather", weights, shard, tp)
    return _UnitTimes(gather_us, again_us, scatter_us, scatter_us + over_replicas)


def update_us(cluster: Cluster, mesh: Mesh, trained: int) -> float:
    return _UPDATE_BYTES * trained / mesh.shard / cluster.bytes_per_us


def hop_us(job: Job, cluster: Cluster, d: Degrees) -> float:
    # Stages are the outermost dimension of the mesh: a neighbour is as many ranks away.
    far = d.tp * d.cp * d.dp >= cluster.node_size
    return cluster.links.send_us(border_bytes(job, d), far=far)


def data_parallel_us(
    job: Job, cluster: Cluster, mesh: Mesh, blocks: Sequence[Part], block_extra_us: float,
    ends_us: float,
) -> float:  # fmt: skip
    """Of all microbatches without a pipeline; `ends_us` is of one in what is beside the blocks.

    `blocks` : one of each kind. `block_extra_us` : of one, on average.
    """
    degrees, links = mesh.degrees, cluster.links
    last, weights = degrees.microbatches - 1, job.weights
    units = [_unit_times(cluster, mesh, weights[place]) for place in job.block_positions]
    ends = _unit_times(cluster, mesh, weights["first"], weights["last"])
    of_kind = list(zip(np.bincount(job.kind_of_layer).tolist(), blocks, units, strict=True))

    def one_us(i: int) -> float:
        # Parameters that are kept whole are gathered once.
        is_gathered = mesh.keep > 1 or i == 0

        def back_us(of: _UnitTimes) -> float:
            return of.again_us + (of.reduce_us if i == last else of.scatter_us * mesh.reduce_each)

        def block_us(block: Part, unit: _UnitTimes) -> float:
            forward = links.both_us(block.forward_us, unit.gather_us * is_gathered)
            return forward + links.both_us(block.backward_us + block_extra_us, back_us(unit))

        around = links.both_us(ends_us, ends.gather_us * is_gathered + back_us(ends))
        return sum(count * block_us(block, unit) for count, block, unit in of_kind) + around

    # Microbatches between the first and the last are alike.
    between = max(degrees.microbatches - 2, 0)
    total = sum(map(one_us, {0, last})) + (between * one_us(1) if between else 0.0)
    return units[0].gather_us + units[0].reduce_us + total


def behind_pipeline_us(
    job: Job, cluster: Cluster, mesh: Mesh, blocks: Sequence[Part], counts: _Counts, trained: int
) -> float:
    """What a stage's states add to a pipeline: gathers before it, reductions and updates behind.

    `blocks` : one of each kind. `counts` : of the stage, for each. `trained` : parameters.
    """
    weights = [job.weights[place] for place in job.block_positions]
    units = [_unit_times(cluster, mesh, one) for one in weights]
    # The first forward has gathers beside it; FSDP2 then keeps parameters whole to the end.
    waits = [
        max(cluster.links.both_us(block.forward_us, unit.gather_us) - block.forward_us, 0.0)
        for block, unit in zip(blocks, units, strict=True)
    ]
    of_unit = [one.trained_on_rank(mesh.degrees.tp) for one in weights]
    largest = max(range(len(weights)), key=lambda kind: of_unit[kind])
    share = trained / max(of_unit[largest], 1)
    reduce_us = share * units[largest].reduce_us
    return float(counts @ waits) + reduce_us + update_us(cluster, mesh, trained)
