"""One stage of a mesh, for every number of blocks: its room, and the least it takes.

The room of a stage is the budget less what its states and borders hold. What the ends of the model
save and need comes off it for each of their options; blocks share the rest. With as many blocks,
less recomputation is better for the sum of all stages and for the slowest one, so the choice inside
a stage does not depend on the others.

Where the gradients of weights are made apart, what they need is held beside (`weights_later.py`).
While a block's inputs get their gradient, its own share of that is held too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import msgspec
import numpy as np
import numpy.typing as npt

from remat.schedules.pipeline.holders import ACTIVATIONS, FOR_WEIGHTS, RUNNING
from remat.solver.cluster.equal_blocks import EqualBlocks, Limit
from remat.solver.cluster.held_bytes import held_bytes
from remat.solver.cluster.in_flight import Flight, chunks_in_flight, flights
from remat.solver.cluster.job import Cluster, Job
from remat.solver.cluster.mesh import Mesh
from remat.solver.cluster.parts import NOTHING, Part, PartOption

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class StagePlan(msgspec.Struct, frozen=True):
    """A stage as planned.

    Attributes
    ----------
    blocks : their number. in_flight : microbatches whose saved bytes are live at once.
    options : how many blocks take which option of the block. first, last : options of the ends,
        where the stage has them. work_us, extra_us : of one microbatch, without and for what is
        computed again. saved_bytes : of one microbatch in flight. held_bytes : by holder.
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
        """All that it holds."""
        return sum(self.held_bytes.values())

    @property
    def overhead(self) -> float:
        """Recomputation over the work."""
        return self.extra_us / self.work_us if self.work_us else 0.0


@dataclass(frozen=True)
class StageTable:
    """What stage `index` of a mesh takes for 0, 1, ... blocks.

    Attributes
    ----------
    block, table : the parts, and the tables of its blocks. room_bytes : of activations, and of what
        waits for gradients of weights.
    extra_us : of one microbatch, inf where it does not fit. picks : options of the ends.
    """

    job: Job
    cluster: Cluster
    mesh: Mesh
    index: int
    block: Part
    ends: tuple[Part, Part]
    table: EqualBlocks
    held: dict[str, Counts]
    room_bytes: Counts
    extra_us: Floats
    picks: Counts
    pairs: list[tuple[int, int]]

    @property
    def work_us(self) -> Floats:
        """Of one microbatch, by blocks."""
        ends_us = sum(end.work_us for end in self.ends)
        return np.arange(len(self.extra_us), dtype=np.float64) * self.block.work_us + ends_us

    @property
    def times_us(self) -> Floats:
        """Of one microbatch, by blocks."""
        return self.work_us + self.extra_us

    def fill_us(self, blocks: int, wait_us: float) -> float:
        """What one microbatch takes of the bubble, with so many blocks.

        It is the stage's own time (Narayanan et al. 2021). Gradients of weights that are made apart
        fill it, as far as a forward or the gradient of an input is as long: f + i - min(f, i, w).
        """
        time_us = float(self.times_us[blocks]) + wait_us
        if not self.mesh.degrees.is_split or not math.isfinite(time_us):
            return time_us
        weight_us = blocks * self.block.later.weight_us
        ends_us = sum(end.forward_us for end in self.ends)
        forward_us = blocks * self.block.forward_us + ends_us + wait_us / 2
        input_us = time_us - forward_us - weight_us
        return forward_us + input_us - min(forward_us, input_us, weight_us)

    def stage(self, blocks: int) -> StagePlan:
        """With so many blocks, which fit."""
        pair = self.pairs[int(self.picks[blocks])]
        first, last = (end.options[i] for end, i in zip(self.ends, pair, strict=True))
        by_ends = _saved_by_ends(self.mesh, self.index, first, last)
        left_bytes = self.room_bytes[[blocks]] - by_ends
        limits = _limits(self.mesh, self.index, self.block, np.array([blocks]), left_bytes)
        options = self.table.chosen(blocks, limits, max(first.need_bytes, last.need_bytes))
        chosen = [self.block.options[i] for i in options]
        by_blocks = sum(o.saved_bytes * n for o, n in zip(chosen, options.values(), strict=True))
        need = max((o.need_bytes for o in (*chosen, first, last)), default=0)
        held = {name: int(sizes[blocks]) for name, sizes in self.held.items()}
        fullest = self._fullest(blocks, by_blocks)
        if self.mesh.degrees.is_split:
            held[FOR_WEIGHTS] = int(_waiting_bytes(fullest, self.block, np.array(blocks)))
        return StagePlan(
            blocks, fullest.saved, options,
            pair[0] if self.ends[0] is not NOTHING else None,
            pair[1] if self.ends[1] is not NOTHING else None,
            float(self.work_us[blocks]), float(self.extra_us[blocks]), by_blocks,
            held | {ACTIVATIONS: int(fullest.saved * by_blocks) + by_ends,
                    RUNNING: need},
        )  # fmt: skip

    def _fullest(self, blocks: int, saved_bytes: int) -> Flight:
        """Where so many blocks, which save so much together, hold the most."""
        later_bytes = blocks * self.block.later.held_bytes

        def held_bytes_at(one: Flight) -> float:
            return one.saved * saved_bytes + one.waiting * later_bytes

        return max(_flights(self.mesh, self.index), key=held_bytes_at)


def stage_table(
    job: Job, cluster: Cluster, mesh: Mesh, index: int, parts: tuple[Part, Part, Part],
    table: EqualBlocks,
) -> StageTable:  # fmt: skip
    """The table of one stage.

    Parameters
    ----------
    parts : first, block, last. table : of the block's options.
    """
    degrees = mesh.degrees
    is_first, is_last = index == 0, index == degrees.pp - 1
    ends = parts[0] if is_first else NOTHING, parts[2] if is_last else NOTHING
    blocks = np.arange(job.layers + 1)
    opened = _chunks_in_flight(mesh, index)
    held = held_bytes(job, cluster, mesh, blocks, opened, first=is_first, last=is_last)
    room = cluster.budget_bytes - sum(held.values(), np.zeros_like(blocks))
    pairs = list(product(range(len(ends[0].options)), range(len(ends[1].options))))
    extra, picks = np.full(blocks.shape, np.inf), np.zeros_like(blocks)
    for pick, (i, j) in enumerate(pairs):
        first, last = ends[0].options[i], ends[1].options[j]
        left = room - _saved_by_ends(mesh, index, first, last)
        beside = max(first.need_bytes, last.need_bytes)
        limits = _limits(mesh, index, parts[1], blocks, left)
        found = table.least_us(blocks, limits, beside) + first.extra_us + last.extra_us
        better = found < extra
        extra[better], picks[better] = found[better], pick
    return StageTable(
        job, cluster, mesh, index, parts[1], ends, table, held, room, extra, picks, pairs
    )


def _limits(
    mesh: Mesh, index: int, block: Part, blocks: Counts, left_bytes: Counts
) -> list[Limit]:  # fmt: skip
    """Room for what so many blocks save, at each moment that may hold the most."""
    return [
        Limit(left_bytes - _waiting_bytes(one, block, blocks) * mesh.degrees.is_split, one.saved)
        for one in _flights(mesh, index)
    ]


def _waiting_bytes(flight: Flight, block: Part, blocks: Counts) -> Counts:
    """Held for gradients of weights: of all that wait, and of the block that runs."""
    later = block.later.held_bytes
    return np.ceil(flight.waiting * blocks * later).astype(np.int64) + later


def _flights(mesh: Mesh, index: int) -> tuple[Flight, ...]:
    d = mesh.degrees
    return flights(index, d.pp, d.microbatches, d.chunks, is_split=d.is_split)


def _chunks_in_flight(mesh: Mesh, index: int) -> int:
    d = mesh.degrees
    return chunks_in_flight(index, d.pp, d.microbatches, d.chunks, is_split=d.is_split)


def _saved_by_ends(mesh: Mesh, index: int, first: PartOption, last: PartOption) -> int:
    """Of all microbatches in flight. Behind the last chunk backward begins at once."""
    of_first = min(mesh.degrees.microbatches, _chunks_in_flight(mesh, index))
    return of_first * first.saved_bytes + last.saved_bytes
