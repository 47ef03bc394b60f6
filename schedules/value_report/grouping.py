"""Values and runs summed by module, by op or by source line, equal layers folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

from remat.graph_capture.graph import Op, TrainingGraph
from remat.schedules.schedule import Schedule
from remat.schedules.value_report.rows import ValueRow

_INDEX = "#"
"""What stands for an index in the pattern of a path."""
DASH = "\u2013"

Indices = tuple[int, ...]
_T = TypeVar("_T")


def split_indices(module: str) -> tuple[str, Indices]:
    """The pattern of a path and its indices: ``a.#.b`` and ``(3,)`` of ``a.3.b``."""
    parts = module.split(".")
    pattern = ".".join(_INDEX if part.isdecimal() else part for part in parts)
    return pattern, tuple(int(part) for part in parts if part.isdecimal())


def boxes(indices: Iterable[Indices]) -> Iterator[tuple[tuple[int, ...], ...]]:
    whole = sorted(set(indices))
    # A path without indices.
    if whole == [()]:
        yield ()
        return
    tails: dict[int, list[Indices]] = {}
    for first, *rest in whole:
        tails.setdefault(first, []).append(tuple(rest))
    # Join outer indices that have the same inner ones, so that a full product such as
    # ``stages.0-3.0-1`` stays whole.
    firsts: dict[tuple[Indices, ...], list[int]] = {}
    for first, inner in tails.items():
        firsts.setdefault(tuple(inner), []).append(first)
    for inner, outer in firsts.items():
        for box in boxes(inner):
            yield (tuple(outer), *box)


def _inside(by_index: Mapping[Indices, _T], box: tuple[tuple[int, ...], ...]) -> list[_T]:
    return [
        one
        for indices, one in by_index.items()
        if all(index in part for index, part in zip(indices, box, strict=True))
    ]


def written(pattern: str, box: tuple[tuple[int, ...], ...]) -> str:
    """The path of a product: ``stages.0-3.0-1.conv1``."""
    parts = iter(box)
    return ".".join(
        ranges_text(next(parts)) if part == _INDEX else part for part in pattern.split(".")
    )


def ranges_text(indices: tuple[int, ...]) -> str:
    """``0-5``, ``0,2,4``, ``0-2,5`` of rising indices."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}{DASH}{run[-1]}" for run in runs)


GroupBy = Literal["module", "op", "line"]
_WITHOUT = {"module": "(no module)", "op": "(no op)", "line": "(no line)"}


class Group(msgspec.Struct, frozen=True):
    """What the ops of one module, of one kind or of one line make, and what they do again.

    Attributes
    ----------
    count : how many layers are folded in it. size_bytes : of one copy of each of its `values`.
    kept_bytes, recomputed_bytes, offloaded_bytes : of those with that verdict in forward.
    cost_us : of one run of each op. runs_again, recomputed_us : of the runs after the first.
    """

    name: str
    count: int
    values: int
    size_bytes: int
    kept_bytes: int
    recomputed_bytes: int
    offloaded_bytes: int
    at_peak_bytes: int
    cost_us: float
    runs_again: int
    recomputed_us: float


@dataclass
class _Sums:
    figures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_FIGURES, 0))
    cost_us: float = 0.0
    recomputed_us: float = 0.0


_FIGURES = (
    "values", "size_bytes", "kept_bytes", "recomputed_bytes", "offloaded_bytes", "at_peak_bytes",
    "runs_again",
)  # fmt: skip
_OF_VERDICT = {
    "keep": "kept_bytes", "recompute": "recomputed_bytes", "offload": "offloaded_bytes"
}  # fmt: skip


def group_rows(
    graph: TrainingGraph, schedule: Schedule | None, rows: Sequence[ValueRow], by: GroupBy
) -> tuple[Group, ...]:
    """Sum `rows`, and the runs of their ops; what holds most at the peak comes first."""
    sums: dict[str, _Sums] = {}
    for row in rows:
        _add(sums.setdefault(_name(row.module, row.target, row.source, by), _Sums()), row)
    runs = schedule.computations() if schedule else Counter[str]()
    # By op, not by row: an op with several values still runs once.
    for op in _ops_of(graph, rows):
        one = sums[_name(op.module, op.target, op.source, by)]
        again = max(runs[op.name] - 1, 0)
        one.cost_us += op.cost_us
        one.recomputed_us += again * op.cost_us
        one.figures["runs_again"] += again
    return tuple(sorted(_folded_groups(sums), key=_rank))


def _rank(group: Group) -> tuple[int, int, float]:
    return -group.at_peak_bytes, -group.size_bytes, -group.cost_us


def _name(module: str, target: str, source: str, by: GroupBy) -> str:
    return {"module": module, "op": target, "line": source}[by] or _WITHOUT[by]


def _ops_of(graph: TrainingGraph, rows: Iterable[ValueRow]) -> list[Op]:
    # An op may make several rows: take it once.
    return [graph.ops[graph.op_index[name]] for name in dict.fromkeys(row.op for row in rows)]


def _add(sums: _Sums, row: ValueRow) -> None:
    sums.figures["values"] += 1
    sums.figures["size_bytes"] += row.size_bytes
    if row.phase == "forward" and row.verdict in _OF_VERDICT:
        sums.figures[_OF_VERDICT[row.verdict]] += row.size_bytes
    if row.at_peak:
        sums.figures["at_peak_bytes"] += row.size_bytes


def _folded_groups(sums: dict[str, _Sums]) -> list[Group]:
    alike: dict[tuple[str, tuple[int, ...]], dict[Indices, _Sums]] = {}
    for name, one in sums.items():
        pattern, indices = split_indices(name)
        # Layers with equal bytes and counts fold. Their times may differ, and are added up.
        alike.setdefault((pattern, tuple(one.figures.values())), {})[indices] = one
    return [
        _group(written(pattern, box), _inside(by_index, box))
        for (pattern, _), by_index in alike.items()
        for box in boxes(by_index)
    ]


def _group(name: str, parts: Sequence[_Sums]) -> Group:
    whole = {figure: sum(part.figures[figure] for part in parts) for figure in _FIGURES}
    return Group(
        name=name,
        count=len(parts),
        cost_us=sum(part.cost_us for part in parts),
        recomputed_us=sum(part.recomputed_us for part in parts),
        **whole,
    )


class FoldedRow(msgspec.Struct, frozen=True):
    """Rows that differ only in their names and in the indices of their module path.

    `size_bytes` and `cost_us` are sums of one copy and one run each; `recomputed_us` of later runs.
    """

    module: str
    count: int
    first: ValueRow
    size_bytes: int
    cost_us: float
    recomputed_us: float
    values: tuple[str, ...]


def fold_rows(rows: Sequence[ValueRow]) -> tuple[FoldedRow, ...]:
    alike: dict[Hashable, dict[Indices, ValueRow]] = {}
    # The n-th value of an op in one layer folds with the n-th in the others.
    for row, ordinal in zip(rows, _ordinals(rows), strict=True):
        pattern, indices = split_indices(row.module)
        alike.setdefault((pattern, ordinal, *_facts(row)), {})[indices] = row
    found = [one for by_index in alike.values() for one in _folded_rows(by_index)]
    place = {row.value: i for i, row in enumerate(rows)}
    return tuple(sorted(found, key=lambda one: place[one.first.value]))


def _ordinals(rows: Iterable[ValueRow]) -> list[int]:
    seen: Counter[tuple[str, ...]] = Counter()
    ordinals: list[int] = []
    for row in rows:
        key = (row.module, row.target, row.phase, row.source, str(row.shape))
        ordinals.append(seen[key])
        seen[key] += 1
    return ordinals


def _facts(row: ValueRow) -> tuple[Hashable, ...]:
    # Costs are left out: they may differ between layers, and are added up.
    return (
        row.target, row.phase, row.kind, row.verdict, row.again, row.size_bytes, row.dtype,
        row.shape, row.source, row.at_peak, row.cost_origin,
    )  # fmt: skip


def _folded_rows(by_index: dict[Indices, ValueRow]) -> list[FoldedRow]:
    pattern, _ = split_indices(next(iter(by_index.values())).module)
    return [_folded_row(written(pattern, box), _inside(by_index, box)) for box in boxes(by_index)]


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
