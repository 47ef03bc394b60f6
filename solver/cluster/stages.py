"""One stage of a mesh, for every number of blocks: its room, and the least it takes.

The room of a stage is the budget less what its states and borders hold. What the ends of the model
save and need comes off it for each of their options; blocks share the rest. With as many blocks,
less recomputation is better for the sum of all stages and for the slowest one, so the choice inside
a stage does not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import msgspec
import numpy as np
import numpy.typing as npt

from remat.solver.cluster.equal_blocks import EqualBlocks
from remat.solver.cluster.held_bytes import held_bytes
from remat.solver.cluster.in_flight import chunks_in_flight, in_flight
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
    block, table : the parts, and the tables of its blocks. room_bytes : of activations.
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

    def stage(self, blocks: int) -> StagePlan:
        """With so many blocks, which fit."""
        flight = _flight(self.mesh, self.index)
        pair = self.pairs[int(self.picks[blocks])]
        first, last = (end.options[i] for end, i in zip(self.ends, pair, strict=True))
        left = int(self.room_bytes[blocks]) - _saved_by_ends(self.mesh, self.index, first, last)
        options = self.table.chosen(blocks, left, flight, max(first.need_bytes, last.need_bytes))
        chosen = [self.block.options[i] for i in options]
        by_blocks = sum(o.saved_bytes * n for o, n in zip(chosen, options.values(), strict=True))
        need = max((o.need_bytes for o in (*chosen, first, last)), default=0)
        held = {name: int(sizes[blocks]) for name, sizes in self.held.items()}
        saved = int(flight * by_blocks) + _saved_by_ends(self.mesh, self.index, first, last)
        return StagePlan(
            blocks, flight, options,
            pair[0] if self.ends[0] is not NOTHING else None,
            pair[1] if self.ends[1] is not NOTHING else None,
            float(self.work_us[blocks]), float(self.extra_us[blocks]),
            by_blocks, held | {"saved activations": saved, "while a block runs": need},
        )  # fmt: skip


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
    flight = _flight(mesh, index)
    open_forwards = chunks_in_flight(index, degrees.pp, degrees.microbatches, degrees.chunks)
    held = held_bytes(job, cluster, mesh, blocks, open_forwards, first=is_first, last=is_last)
    room = cluster.budget_bytes - sum(held.values(), np.zeros_like(blocks))
    pairs = list(product(range(len(ends[0].options)), range(len(ends[1].options))))
    extra, picks = np.full(blocks.shape, np.inf), np.zeros_like(blocks)
    for pick, (i, j) in enumerate(pairs):
        first, last = ends[0].options[i], ends[1].options[j]
        left = room - _saved_by_ends(mesh, index, first, last)
        beside = max(first.need_bytes, last.need_bytes)
        found = table.least_us(blocks, left, flight, beside) + first.extra_us + last.extra_us
        better = found < extra
        extra[better], picks[better] = found[better], pick
    return StageTable(
        job, cluster, mesh, index, parts[1], ends, table, held, room, extra, picks, pairs
    )


def _flight(mesh: Mesh, index: int) -> float:
    degrees = mesh.degrees
    return in_flight(index, degrees.pp, degrees.microbatches, degrees.chunks)


def _saved_by_ends(mesh: Mesh, index: int, first: PartOption, last: PartOption) -> int:
    """Of all microbatches in flight. Behind the last chunk backward begins at once."""
    degrees = mesh.degrees
    of_first = min(degrees.microbatches, chunks_in_flight(
        index, degrees.pp, degrees.microbatches, degrees.chunks
    ))  # fmt: skip
    return of_first * first.saved_bytes + last.saved_bytes
