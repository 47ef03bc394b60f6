"""One option for each block: a multiple-choice knapsack whose room shrinks from block to block.

Also called: prefix-constrained multiple-choice knapsack, solved by dynamic programming.
What a block keeps is live while every later block runs, forward and backward. When its own
backward runs, later blocks are done: only gradients and outputs of theirs are left. So there is
one row for each block: what the blocks before it keep plus what it needs itself is within the
room. Where blocks copy values below the device, what they have there adds up over all of them: a
coordinate more for each tier whose room binds.
Optimal on the grid. Cost: blocks x options x slots, in vector operations, times `_BELOW_SLOTS` for
each tier that binds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from remat.solver.blocks.block_options import NO_LOWER_BYTES, LowerBytes, Options
from remat.solver.blocks.repeated import Block
from remat.solver.problem import Problem

_BELOW_SLOTS = 64
"""Steps of the grid of a tier below the device."""
PlacedBlock = tuple[Block, Options]
"""A block in its place, and the options that it shares with its equals."""


class BlockChoice(NamedTuple):
    saved_bytes: int
    need_bytes: int  # most live while the block runs, but for what blocks before it keep
    extra_us: float
    below_bytes: LowerBytes = NO_LOWER_BYTES  # on the host, on NVMe


def choices_in_place(
    problem: Problem, layers: Sequence[PlacedBlock], beside_bytes: Sequence[int] = ()
) -> list[list[BlockChoice]]:
    """Options in place; `beside_bytes` are live beside each op and in no block's own graph."""
    fixed = _fixed_bytes(problem, layers)
    fixed[: len(beside_bytes)] += np.array(beside_bytes, np.int64)
    return [_choices(block, table, fixed) for block, table in layers]


def _fixed_bytes(problem: Problem, layers: Sequence[PlacedBlock]) -> npt.NDArray[np.int64]:
    """For each stage what blocks that are done leave live: gradients, outputs."""
    change = [0] * (problem.n_ops + 2)
    last = [-1] * problem.n_values
    for t, needs in enumerate(problem.needs):
        for v in needs:
            last[v] = t
    for block, _ in layers:
        for op in block.ops:
            for v in problem.outputs[op]:
                if last[v] >= block.back_stop:
                    change[block.back_stop] += problem.size_bytes[v]
                    change[last[v] + 1] -= problem.size_bytes[v]
    return np.array(list(accumulate(change)), np.int64)


def _choices(block: Block, table: Options, fixed: npt.NDArray[np.int64]) -> list[BlockChoice]:
    beside = fixed[stages_of_block(block)]
    # What the block itself leaves is in its `live_bytes` already.
    beside[-1] = beside[-2]
    return [
        BlockChoice(
            option.saved_bytes,
            int((option.live_bytes + beside).max()),
            option.extra_us,
            option.below_bytes,
        )
        for option in table
    ]


def stages_of_block(block: Block) -> list[int]:
    """The graph's stage for each stage of the block's graph, its turn and end included."""
    return [
        *range(block.start, block.stop),
        block.back_start,
        *range(block.back_start, block.back_stop),
        block.back_stop,
    ]


def compose(
    choices: Sequence[Sequence[BlockChoice]],
    room_bytes: int,
    slots: int,
    below_bytes: LowerBytes = NO_LOWER_BYTES,
) -> list[int] | None:
    """One choice a block, of least extra time; None if nothing fits."""
    if room_bytes < 0 or min(below_bytes) < 0:
        return None
    grid = _Grid.of(choices, room_bytes, slots, below_bytes)
    best_us = np.full(grid.shape, np.inf)
    best_us[0, 0, 0] = 0.0
    steps: list[npt.NDArray[np.int16]] = []
    for table in choices:
        following = np.full_like(best_us, np.inf)
        # Small numbers, as the way back needs one such grid for each block.
        step = np.full(grid.shape, -1, np.int16)
        for i, choice in enumerate(table):
            shift = grid.shift(choice)
            ends = [size - by for size, by in zip(grid.shape, shift, strict=True)]
            # While the block runs, what it needs fits beside what blocks before it keep.
            ends[0] = min(ends[0], (room_bytes - choice.need_bytes) // grid.units[0] + 1)
            if min(ends) <= 0:
                continue
            reached = best_us[: ends[0], : ends[1], : ends[2]] + choice.extra_us
            part = tuple(slice(by, by + end) for by, end in zip(shift, ends, strict=True))
            better = reached < following[part]
            following[part][better] = reached[better]
            step[part][better] = i
        steps.append(step)
        best_us = following
    return _traced(choices, steps, best_us, grid)


class _Grid(NamedTuple):
    """The steps of device, host and NVMe, in bytes, and how many places each has."""

    units: tuple[int, int, int]
    shape: tuple[int, int, int]

    @classmethod
    def of(
        cls,
        choices: Sequence[Sequence[BlockChoice]],
        room_bytes: int,
        slots: int,
        below_bytes: LowerBytes,
    ) -> _Grid:
        unit = max(-(-room_bytes // slots), 1)
        units, shape = [unit], [room_bytes // unit + 1]
        for tier, most_bytes in enumerate(below_bytes):
            wanted = sum(max(choice.below_bytes[tier] for choice in table) for table in choices)
            # One place is enough where all that blocks could have there fits.
            unit = max(-(-most_bytes // _BELOW_SLOTS), 1)
            units.append(unit if wanted > most_bytes else 0)
            shape.append(most_bytes // unit + 1 if wanted > most_bytes else 1)
        return cls((units[0], units[1], units[2]), (shape[0], shape[1], shape[2]))

    def shift(self, choice: BlockChoice) -> tuple[int, int, int]:
        host_bytes, nvme_bytes = choice.below_bytes
        sizes = choice.saved_bytes, host_bytes, nvme_bytes
        # Rounded up, so that what fits on the grid fits in bytes.
        first, second, third = (
            -(-size // unit) if unit else 0 for size, unit in zip(sizes, self.units, strict=True)
        )
        return first, second, third


def _traced(
    choices: Sequence[Sequence[BlockChoice]],
    steps: Sequence[npt.NDArray[np.int16]],
    best_us: npt.NDArray[np.float64],
    grid: _Grid,
) -> list[int] | None:
    place = tuple(int(at) for at in np.unravel_index(int(np.argmin(best_us)), grid.shape))
    if not np.isfinite(best_us[place]):
        return None
    chosen: list[int] = []
    for table, step in zip(reversed(choices), reversed(steps), strict=True):
        chosen.append(int(step[place]))
        shift = grid.shift(table[chosen[-1]])
        place = tuple(at - by for at, by in zip(place, shift, strict=True))
    return chosen[::-1]
