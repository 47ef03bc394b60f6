"""One stage of a mesh, for every number of blocks: its room, and the least it takes.

The room of a stage is the budget less what its states and borders hold. What the ends of the model
save and need comes off it for each of their options; blocks share the rest. With as many blocks,
less recomputation is better for the sum of all stages and for the slowest one, so the choice inside
a stage does not depend on the others.

Where the gradients of weights are made apart, what they need is held beside (`parts.py`).
While a block's inputs get their gradient, its own share of that is held too.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from remat.cluster.mesh import Cluster, Degrees, Job, Mesh
from remat.cluster.parts import NO_PART, EqualBlocks, Limit, Part, PartOption
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
#     borders  a receive buffer each way for each microbatch, one gradient on its way, one output
#
# Sources: ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054); FSDP2's buffers as
# measured on CPU ranks. Not counted: temporaries of the optimizer's step.


_Counts = npt.NDArray[np.int64]

_STATE_BYTES, _WEIGHT_BYTES, _GRADIENT_BYTES = 12, 2, 4
"""Of one parameter: master and two moments in float32; in bfloat16; its float32 gradient."""


def stage_parameters(job: Job, tp: int, blocks: _Counts, *, first: bool, last: bool) -> _Counts:
    """Elements that one rank has of a stage with so many blocks."""
    ends = first * job.weights["first"].on_rank(tp) + last * job.weights["last"].on_rank(tp)
    return blocks * job.weights["block"].on_rank(tp) + ends


def least_states_bytes(job: Job, mesh: Mesh) -> float:
    """Of the stage that holds most of P, G and OS, at least; without buffers and activations."""
    all_blocks = np.array(job.layers)
    whole = stage_parameters(job, mesh.degrees.tp, all_blocks, first=True, last=True)
    split = mesh.shard if mesh.reduce_each else 1
    of_one = _STATE_BYTES / mesh.shard + _WEIGHT_BYTES / mesh.keep + _GRADIENT_BYTES / split
    # No cut gives each stage less than the mean.
    return of_one * float(whole) / mesh.degrees.pp


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
    """What stage `index` of a mesh takes for 0, 1, ... blocks.

    `parts` are first, block, last; `table` is of the block's options. `extra_us` is of one
    microbatch, inf where it does not fit; `picks` says which pair of the ends' options it is with.
    """

    def __init__(
        self, job: Job, cluster: Cluster, mesh: Mesh, index: int, parts: tuple[Part, Part, Part],
        table: EqualBlocks,
    ) -> None:  # fmt: skip
        self.mesh, self.index, self.block, self.table = mesh, index, parts[1], table
        self.job, self.cluster = job, cluster
        self.is_first, self.is_last = index == 0, index == mesh.degrees.pp - 1
        self.opened = forwards_in_flight(index, mesh.degrees)
        self.ends = parts[0] if self.is_first else NO_PART, parts[2] if self.is_last else NO_PART
        blocks = np.arange(job.layers + 1)
        self.held = self._bytes_by_holder(blocks)
        self.room_bytes = cluster.budget_bytes - sum(self.held.values(), np.zeros_like(blocks))
        # What the ends save and need comes off the blocks' room, so each pair of their options is
        # tried.
        self.pairs = list(product(self.ends[0].options, self.ends[1].options))
        self.extra_us, self.picks = np.full(blocks.shape, np.inf), np.zeros_like(blocks)
        for pick, (first, last) in enumerate(self.pairs):
            limits = self._limits(blocks, self._saved_by(first, last))
            beside = max(first.need_bytes, last.need_bytes)
            found = table.least_us(blocks, limits, beside) + first.extra_us + last.extra_us
            better = found < self.extra_us
            self.extra_us[better], self.picks[better] = found[better], pick

    @property
    def work_us(self) -> Floats:
        """Of one microbatch, by blocks."""
        ends_us = sum(end.work_us for end in self.ends)
        return np.arange(len(self.extra_us), dtype=np.float64) * self.block.work_us + ends_us

    @property
    def times_us(self) -> Floats:
        return self.work_us + self.extra_us

    def fill_us(self, blocks: int, wait_us: float) -> float:
        """What one microbatch takes of the bubble: the stage's own time (Narayanan et al. 2021)."""
        time_us = float(self.times_us[blocks]) + wait_us
        if not self.mesh.degrees.is_split or not math.isfinite(time_us):
            return time_us
        weight_us = blocks * self.block.later.weight_us
        ends_us = sum(end.forward_us for end in self.ends)
        forward_us = blocks * self.block.forward_us + ends_us + wait_us / 2
        input_us = time_us - forward_us - weight_us
        # W fills the bubble as far as a forward or an I is as long: f + i - min(f, i, w).
        return forward_us + input_us - min(forward_us, input_us, weight_us)

    def stage(self, blocks: int) -> StagePlan:
        first, last = self.pairs[int(self.picks[blocks])]
        by_ends = self._saved_by(first, last)
        limits = self._limits(np.array([blocks]), by_ends)
        options = self.table.chosen(blocks, limits, max(first.need_bytes, last.need_bytes))
        chosen = [self.block.options[i] for i in options]
        by_blocks = sum(o.saved_bytes * n for o, n in zip(chosen, options.values(), strict=True))
        need = max((o.need_bytes for o in (*chosen, first, last)), default=0)
        held = {name: int(sizes[blocks]) for name, sizes in self.held.items()}
        later_bytes = blocks * self.block.later.held_bytes
        # Where so many blocks, which save so much together, hold the most.
        fullest = max(
            flights(self.index, self.mesh.degrees),
            key=lambda one: one.saved * by_blocks + one.waiting * later_bytes,
        )
        if self.mesh.degrees.is_split:
            held[FOR_WEIGHTS] = int(_waiting_bytes(fullest, self.block, np.array(blocks)))
        return StagePlan(
            blocks, fullest.saved, options,
            self.ends[0].options.index(first) if self.ends[0] is not NO_PART else None,
            self.ends[1].options.index(last) if self.ends[1] is not NO_PART else None,
            float(self.work_us[blocks]), float(self.extra_us[blocks]), by_blocks,
            held | {SAVED_ACTIVATIONS: int(fullest.saved * by_blocks) + by_ends, RUNNING: need},
        )  # fmt: skip

    def _bytes_by_holder(self, blocks: _Counts) -> dict[str, _Counts]:
        tp, shard, keep = self.mesh.degrees.tp, self.mesh.shard, self.mesh.keep
        parameters = stage_parameters(self.job, tp, blocks, first=self.is_first, last=self.is_last)
        one_block = self.job.weights["block"].on_rank(tp)
        buffers = 0 if keep == 1 and shard == 1 else 2 * _WEIGHT_BYTES * one_block
        reduced = _GRADIENT_BYTES * one_block if shard > 1 else 0
        split = shard if self.mesh.reduce_each else 1
        sizes = (
            _STATE_BYTES * parameters // shard,
            _WEIGHT_BYTES * parameters // keep + buffers,
            _GRADIENT_BYTES * parameters // split + reduced,
            np.zeros_like(blocks) + self._border_buffers(),
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

    def _limits(self, blocks: _Counts, by_ends: int) -> list[Limit]:
        """Room for what so many blocks save, at each moment that may hold the most."""
        left, is_split = self.room_bytes[blocks] - by_ends, self.mesh.degrees.is_split
        return [
            Limit(left - _waiting_bytes(one, self.block, blocks) * is_split, one.saved)
            for one in flights(self.index, self.mesh.degrees)
        ]

    def _saved_by(self, first: PartOption, last: PartOption) -> int:
        """Bytes of the ends, over all microbatches in flight."""
        of_first = min(self.mesh.degrees.microbatches, self.opened)
        # Behind the last virtual stage backward begins at once.
        return of_first * first.saved_bytes + last.saved_bytes


def _waiting_bytes(flight: _Flight, block: Part, blocks: _Counts) -> _Counts:
    """Held for gradients of weights: of all that wait, and of the block that runs."""
    later = block.later.held_bytes
    return np.ceil(flight.waiting * blocks * later).astype(np.int64) + later


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


def _unit_times(cluster: Cluster, mesh: Mesh, parameters: int) -> _UnitTimes:
    """Of a unit with so many parameters on a tensor parallel rank."""
    links, tp, shard = cluster.links, mesh.degrees.tp, mesh.shard
    weights, gradients = _WEIGHT_BYTES * parameters, _GRADIENT_BYTES * parameters
    # hpZ: from forward to backward, shards lie over fewer ranks.
    over = mesh.keep if mesh.keep < shard else shard
    again_us = 0.0 if mesh.keep == 1 else links.us("all_gather", weights, over, tp)
    scatter_us = links.us("reduce_scatter", gradients, shard, tp)
    over_replicas = links.us("all_reduce", gradients / shard, mesh.replicas, tp * shard)
    gather_us = links.us("all_gather", weights, shard, tp)
    return _UnitTimes(gather_us, again_us, scatter_us, scatter_us + over_replicas)


def update_us(cluster: Cluster, mesh: Mesh, parameters: int) -> float:
    return _UPDATE_BYTES * parameters / mesh.shard / cluster.bytes_per_us


def hop_us(job: Job, cluster: Cluster, d: Degrees) -> float:
    # Stages are the outermost dimension of the mesh: a neighbour is as many ranks away.
    far = d.tp * d.cp * d.dp >= cluster.node_size
    return cluster.links.send_us(border_bytes(job, d), far=far)


def data_parallel_us(
    job: Job, cluster: Cluster, mesh: Mesh, block: Part, block_extra_us: float, ends_us: float
) -> float:
    """Of all microbatches without a pipeline; `ends_us` is of one in what is beside the blocks."""
    degrees, links = mesh.degrees, cluster.links
    tp, last = degrees.tp, degrees.microbatches - 1
    unit = _unit_times(cluster, mesh, job.weights["block"].on_rank(tp))
    of_ends = job.weights["first"].on_rank(tp) + job.weights["last"].on_rank(tp)
    ends = _unit_times(cluster, mesh, of_ends)

    def one_us(i: int) -> float:
        # Parameters that are kept whole are gathered once.
        is_gathered = mesh.keep > 1 or i == 0

        def back_us(of: _UnitTimes) -> float:
            return of.again_us + (of.reduce_us if i == last else of.scatter_us * mesh.reduce_each)

        forward = links.both_us(block.forward_us, unit.gather_us * is_gathered)
        backward = links.both_us(block.backward_us + block_extra_us, back_us(unit))
        around = links.both_us(ends_us, ends.gather_us * is_gathered + back_us(ends))
        return job.layers * (forward + backward) + around

    # Microbatches between the first and the last are alike.
    between = max(degrees.microbatches - 2, 0)
    total = sum(map(one_us, {0, last})) + (between * one_us(1) if between else 0.0)
    return unit.gather_us + unit.reduce_us + total


def behind_pipeline_us(
    job: Job, cluster: Cluster, mesh: Mesh, block: Part, blocks: int, parameters: int
) -> float:
    """What a stage's states add to a pipeline: gathers before it, reductions and updates behind."""
    of_block = job.weights["block"].on_rank(mesh.degrees.tp)
    unit = _unit_times(cluster, mesh, of_block)
    # The first forward has gathers beside it; FSDP2 then keeps parameters whole to the end.
    waits = max(cluster.links.both_us(block.forward_us, unit.gather_us) - block.forward_us, 0.0)
    share = parameters / max(of_block, 1)
    return blocks * waits + share * unit.reduce_us + update_us(cluster, mesh, parameters)
