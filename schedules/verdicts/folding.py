"""Rows of equal layers folded to one: ``layers.0-11, x12``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import msgspec

from remat.schedules.verdicts.index_ranges import Indices, boxes, inside, split_indices, written
from remat.schedules.verdicts.rows import ValueRow


class FoldedRow(msgspec.Struct, frozen=True):
    """Rows that differ only in their names and in the indices of their module path.

    Attributes
    ----------
    module : with ranges for indices. count : how many rows. first : the first of them.
    size_bytes, cost_us : summed over the rows, one copy and one run each.
    recomputed_us : of all runs after the first. values : their names.
    """

    module: str
    count: int
    first: ValueRow
    size_bytes: int
    cost_us: float
    recomputed_us: float
    values: tuple[str, ...]


def folded(rows: Sequence[ValueRow]) -> tuple[FoldedRow, ...]:
    """Fold rows of equal layers: the same op, phase, verdict, size, shape and source line.

    The n-th value of an op in one layer folds with the n-th in the others. Prices may differ,
    since a folded row holds their sum. Folded rows come in the order of their first rows.
    """
    alike: dict[Hashable, dict[Indices, ValueRow]] = {}
    for row, ordinal in zip(rows, _ordinals(rows), strict=True):
        pattern, indices = split_indices(row.module)
        alike.setdefault((pattern, ordinal, *_facts(row)), {})[indices] = row
    found = [one for by_index in alike.values() for one in _folded_rows(by_index)]
    place = {row.value: i for i, row in enumerate(rows)}
    return tuple(sorted(found, key=lambda one: place[one.first.value]))


def _ordinals(rows: Iterable[ValueRow]) -> list[int]:
    """For each row: how many rows before it have the same op and place in the same module."""
    seen: Counter[tuple[str, ...]] = Counter()
    ordinals: list[int] = []
    for row in rows:
        key = (row.module, row.target, row.phase, row.source, str(row.shape))
        ordinals.append(seen[key])
        seen[key] += 1
    return ordinals


def _facts(row: ValueRow) -> tuple[Hashable, ...]:
    return (
        row.target, row.phase, row.kind, row.verdict, row.again, row.size_bytes, row.dtype,
        row.shape, row.source, row.at_peak, row.price,
    )  # fmt: skip


def _folded_rows(by_index: dict[Indices, ValueRow]) -> list[FoldedRow]:
    pattern, _ = split_indices(next(iter(by_index.values())).module)
    return [_folded_row(written(pattern, box), inside(by_index, box)) for box in boxes(by_index)]


def _folded_row(module: str, rows: Sequence[ValueRow]) -> FoldedRow:
    return FoldedRow(
        module=module,
        count=len(rows),
        first=rows[0],
        size_bytes=sum(row.size_bytes for row in rows),
        cost_us=sum(row.cost_us for row in rows),
        recomputed_us=sum(row.again * row.cost_us for row in rows),
        values=tuple(row.value for row in rows),
    )
