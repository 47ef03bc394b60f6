"""The least recomputation of n equal blocks in any room.

A stage of a pipeline holds what its blocks save, once for each microbatch in flight, and beside it
what one block needs while it runs:

    in flight · Σ saved + max need  ≤  room

For each bound on the need that matters, one table has the least extra time of n blocks that save
no more than so many steps of a grid. Sizes are rounded up to the grid, so what a table allows
fits. Cost: blocks x options x slots for each distinct need, in vector operations.
Optimal on the grid: never below the optimum, and never above that of a room which is smaller by a
step of the grid for each block and microbatch in flight (`tests/solver/cluster`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from remat.solver.cluster.parts import PartOption

SLOTS = 2048
"""Steps of the grid for what all blocks save together."""
CLOSE_US = 1e-6
"""Two sums of the same times, in another order, differ by less."""

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class NeedTable(NamedTuple):
    """Least extra time by blocks (row) and slots (column), of options that need no more."""

    need_bytes: int
    least_us: Floats


class Limit(NamedTuple):
    """Room for what so many microbatches save, and for what one block needs beside.

    Attributes
    ----------
    room_bytes : for each number of blocks. in_flight : microbatches whose saved bytes are live at
        once; a fraction where a rank has several chunks, of which one holds a part of the blocks.
    """

    room_bytes: Counts
    in_flight: float


class EqualBlocks:
    """Tables for up to `most` blocks that share `options`."""

    def __init__(self, options: Sequence[PartOption], most: int, slots: int = SLOTS) -> None:
        self.options = tuple(options)
        self.most = most
        largest = max((option.saved_bytes for option in self.options), default=0)
        self.unit_bytes = max(-(-largest * most // slots), 1)
        self.steps = [-(-option.saved_bytes // self.unit_bytes) for option in self.options]
        self.width = max(self.steps, default=0) * most + 1

    @cached_property
    def tables(self) -> list[NeedTable]:
        """One for each distinct need, ascending."""
        needs = sorted({option.need_bytes for option in self.options})
        return [NeedTable(need, self._least_us(need)) for need in needs]

    def _least_us(self, need_bytes: int) -> Floats:
        least = np.full((self.most + 1, self.width), np.inf)
        least[0] = 0.0
        for n in range(1, self.most + 1):
            for option, step in zip(self.options, self.steps, strict=True):
                if option.need_bytes <= need_bytes:
                    reached = least[n - 1, : self.width - step] + option.extra_us
                    np.minimum(least[n, step:], reached, out=least[n, step:])
        return least

    def least_us(self, blocks: Counts, limits: Sequence[Limit], beside_bytes: int = 0) -> Floats:
        """For each number of blocks: the least extra time of one microbatch.

        Parameters
        ----------
        limits : all of which hold.
        beside_bytes : what something else needs at times beside all that blocks save.
        """
        out = np.full(blocks.shape, np.inf)
        for need_bytes, least in self.tables:
            slot = self._slots(limits, max(need_bytes, beside_bytes))
            fits = slot >= 0
            out[fits] = np.minimum(out[fits], least[blocks[fits], slot[fits]])
        is_enough = np.all([limit.room_bytes >= beside_bytes for limit in limits], axis=0)
        return np.where((blocks == 0) & is_enough, 0.0, out)

    def chosen(self, blocks: int, limits: Sequence[Limit], beside_bytes: int = 0) -> dict[int, int]:
        """How many blocks take which option, where there is room.

        Parameters
        ----------
        limits : of that number of blocks alone.

        Raises
        ------
        ValueError : nothing fits.
        """
        if not blocks:
            return {}
        need_bytes, least, slot = self._best_table(blocks, limits, beside_bytes)
        count = Counter[int]()
        for n in range(blocks, 0, -1):
            i = next(
                i
                for i, (option, step) in enumerate(zip(self.options, self.steps, strict=True))
                if option.need_bytes <= need_bytes and step <= slot
                if abs(least[n - 1, slot - step] + option.extra_us - least[n, slot]) < CLOSE_US
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
            if slot >= 0 and (best is None or least[blocks, slot] < best[0] - CLOSE_US):
                best = float(least[blocks, slot]), need_bytes, least, slot
        if best is None or not np.isfinite(best[0]):
            rooms = " and ".join(str(int(limit.room_bytes[0])) for limit in limits)
            raise ValueError(f"{blocks} blocks do not fit {rooms} bytes")
        return best[1:]

    def _slots(self, limits: Sequence[Limit], need_bytes: int) -> Counts:
        """What all blocks may save together, in steps of the grid; -1 where there is no room."""
        found = [
            np.floor_divide(limit.room_bytes - need_bytes, limit.in_flight * self.unit_bytes)
            for limit in limits
        ]
        return np.clip(np.min(found, axis=0), -1, self.width - 1).astype(np.int64)
