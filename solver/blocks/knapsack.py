"""One option for each block: a multiple-choice knapsack whose room shrinks from block to block.

Also called: prefix-constrained multiple-choice knapsack, solved by dynamic programming.
What a block keeps is live while every later block runs, forward and backward. When its own
backward runs, later blocks are done: only gradients and outputs of theirs are left. So there is
one row for each block: what the blocks before it keep plus what it needs itself is within the
room.
Optimal on the grid. Cost: blocks x options x slots, in vector operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from remat.solver.blocks.options import Options
from remat.solver.blocks.repeated import Block
from remat.solver.problem import Problem

Layer = tuple[Block, Options]
"""A block in its place, and the options that it shares with its equals."""


class BlockChoice(NamedTuple):
    """An option of one block in its place.

    `need_bytes` is the most that is live while the block runs. It leaves out what the blocks
    before it keep.
    """

    saved_bytes: int
    need_bytes: int
    extra_us: float


def choices_in_place(
    problem: Problem, layers: Sequence[Layer], beside_bytes: Sequence[int] = ()
) -> list[list[BlockChoice]]:
    """The options of each block, with what they need where the block is.

    `beside_bytes` are live while each op first runs, and unknown to the blocks' own graphs.
    """
    fixed = _fixed_bytes(problem, layers)
    fixed[: len(beside_bytes)] += np.array(beside_bytes, np.int64)
    return [_choices(block, table, fixed) for block, table in layers]


def _fixed_bytes(problem: Problem, layers: Sequence[Layer]) -> npt.NDArray[np.int64]:
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
    beside[-1] = beside[-2]
    return [
        BlockChoice(option.saved_bytes, int((option.live_bytes + beside).max()), option.extra_us)
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
    choices: Sequence[Sequence[BlockChoice]], room_bytes: int, slots: int
) -> list[int] | None:
    """One choice a block, of least extra time; None if nothing fits.

    For each block, what the blocks before it save, rounded up to a grid of `slots` steps,
    and the need of its choice are within `room_bytes`.
    """
    if room_bytes < 0:
        return None
    unit = max(-(-room_bytes // slots), 1)
    best_us = np.full(room_bytes // unit + 1, np.inf)
    best_us[0] = 0.0
    steps: list[npt.NDArray[np.int16]] = []
    for table in choices:
        following = np.full_like(best_us, np.inf)
        step = np.full(best_us.size, -1, np.int16)
        for i, choice in enumerate(table):
            shift = -(-choice.saved_bytes // unit)
            last = min((room_bytes - choice.need_bytes) // unit, best_us.size - 1 - shift)
            if last < 0:
                continue
            reached = best_us[: last + 1] + choice.extra_us
            part = slice(shift, shift + last + 1)
            better = reached < following[part]
            following[part][better] = reached[better]
            step[part][better] = i
        steps.append(step)
        best_us = following
    return _traced(choices, steps, best_us, unit)


def _traced(
    choices: Sequence[Sequence[BlockChoice]],
    steps: Sequence[npt.NDArray[np.int16]],
    best_us: npt.NDArray[np.float64],
    unit: int,
) -> list[int] | None:
    slot = int(np.argmin(best_us))
    if not np.isfinite(best_us[slot]):
        return None
    chosen: list[int] = []
    for table, step in zip(reversed(choices), reversed(steps), strict=True):
        chosen.append(int(step[slot]))
        slot -= -(-table[chosen[-1]].saved_bytes // unit)
    return chosen[::-1]
