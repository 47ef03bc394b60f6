"""A head in chunks at any size of a range, from what was measured at a few; without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from remat.graph_capture.chunking.blocks import LEAST_ROWS, largest_block
from remat.graph_capture.graph import Choice, Op, Region, Value

# A workspace is the most that some moment of an op holds: bytes for each row of a block and bytes
# for each row of all. The most of several such sums lies below the line between two of its points,
# so that line bounds what is between. It does where blocks are of as many rows as `largest_block`
# says, as they are unless there are so few rows that there are fewer blocks.


class Extent(msgspec.Struct, frozen=True):
    """What varies of a value: its `shape`, each entry an expression, and its bytes."""

    shape: tuple[str, ...]
    size_bytes: str


class ChunkPoint(msgspec.Struct, frozen=True):
    """What was measured at one size; of each op of the choice, in its order."""

    cost_us: tuple[float, ...]  # empty where workspaces alone were measured
    workspace_bytes: tuple[int, ...]
    rows: tuple[int, ...]  # that the op cuts into blocks; 0 for an op that cuts none


class RangedChoice(msgspec.Struct, frozen=True):
    """A region in one number of chunks, as `Choice` is at one size.

    Attributes
    ----------
    region, chunks, exact, ops, values : as of `Region` and `Choice`, at the largest sizes.
    dropped : the ops that the chunks replace.
    extents : by name, those of `values` that vary.
    rows : of each op, how many it cuts into blocks, as an expression; empty where it cuts none.
    points : from the smallest sizes to the largest.
    """

    region: str
    chunks: int
    exact: bool
    dropped: tuple[str, ...]
    ops: tuple[tuple[str, Op], ...]
    values: tuple[Value, ...]
    extents: dict[str, Extent]
    rows: tuple[str, ...]
    points: tuple[ChunkPoint, ...]

    def at(
        self, shape_of: Callable[[str], int], most_of: Callable[[str], int],
        counted: Callable[[int], int], *, is_bound: bool,
    ) -> Choice:  # fmt: skip
        """The choice at a size. `most_of` is `shape_of`, or if `is_bound`, the most of a part."""
        ops = (
            replace(op, cost_us=self._cost_us(i, n), workspace_bytes=self._bytes(i, n, is_bound))
            for i, (_, op) in enumerate(self.ops)
            for n in [most_of(self.rows[i]) if self.rows[i] else 0]
        )
        values = tuple(
            value
            if (extent := self.extents.get(value.name)) is None
            else replace(
                value, shape=tuple(map(shape_of, extent.shape)),
                size_bytes=counted(most_of(extent.size_bytes)),
            )
            for value in self.values
        )  # fmt: skip
        places = (place for place, _ in self.ops)
        return Choice(self.chunks, self.exact, tuple(zip(places, ops, strict=True)), values)

    def _cost_us(self, i: int, n: int) -> float:
        timed = [one for one in self.points if one.cost_us]
        rows = [one.rows[i] for one in timed]
        low, high = _places_beside(rows, n)
        low_us, high_us = timed[low].cost_us[i], timed[high].cost_us[i]
        return low_us + (high_us - low_us) * (n - rows[low]) / max(rows[high] - rows[low], 1)

    def _bytes(self, i: int, n: int, is_bound: bool) -> int:
        least = LEAST_ROWS * self.chunks if is_bound and self.rows[i] else 0
        known = [one for one in self.points if one.rows[i] >= least]
        if not self.rows[i]:
            return max(one.workspace_bytes[i] for one in known)
        rows, made = ([one.rows[i] for one in known], [one.workspace_bytes[i] for one in known])
        low, high = _places_beside(rows, n)
        if n <= rows[low]:
            return made[low]
        block, low_block, high_block = (
            largest_block(one, self.chunks) for one in (n, rows[low], rows[high])
        )
        part = max(
            (n - rows[low]) / max(rows[high] - rows[low], 1),
            (block - low_block) / max(high_block - low_block, 1),
        )
        return made[low] + math.ceil(max(made[high] - made[low], 0) * min(part, 1.0))


def _places_beside(known: Sequence[int], n: int) -> tuple[int, int]:
    """Places of the numbers next to `n`, which rise; the same twice where `n` is none between."""
    upper = next((i for i, at in enumerate(known) if n <= at), len(known) - 1)
    return (upper if n >= known[upper] else max(upper - 1, 0)), upper


def regions_of(choices: Iterable[tuple[RangedChoice, Choice]]) -> tuple[Region, ...]:
    found: dict[str, Region] = {}
    for one, choice in choices:
        region = found.get(one.region, Region(one.region, one.dropped))
        found[one.region] = replace(region, choices=(*region.choices, choice))
    return tuple(found.values())
