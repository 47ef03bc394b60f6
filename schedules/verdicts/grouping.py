"""Values and runs summed by module, by op or by source line, equal layers folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from remat.graph_capture.graph import Op, TrainingGraph
from remat.schedules.schedule import Schedule
from remat.schedules.verdicts.index_ranges import Indices, boxes, inside, split_indices, written
from remat.schedules.verdicts.rows import ValueRow

By = Literal["module", "op", "line"]
WITHOUT = {"module": "(no module)", "op": "(no op)", "line": "(no line)"}


class Group(msgspec.Struct, frozen=True):
    """What the ops of one module, of one kind or of one line make, and what they do again.

    Attributes
    ----------
    name : of the group, with ranges for indices. count : how many layers are folded in it.
    values : how many values it makes. size_bytes : of one copy of each.
    kept_bytes, recomputed_bytes, offloaded_bytes : of those with that verdict in forward.
    at_peak_bytes : of those that are live at the peak.
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
    """Sums of one name before layers are folded. Layers fold if `figures` are equal; times vary."""

    figures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FIGURES, 0))
    cost_us: float = 0.0
    recomputed_us: float = 0.0


FIGURES = (
    "values", "size_bytes", "kept_bytes", "recomputed_bytes", "offloaded_bytes", "at_peak_bytes",
    "runs_again",
)  # fmt: skip
OF_VERDICT = {
    "keep": "kept_bytes", "recompute": "recomputed_bytes", "offload": "offloaded_bytes"
}  # fmt: skip


def grouped(
    graph: TrainingGraph, schedule: Schedule | None, rows: Sequence[ValueRow], by: By
) -> tuple[Group, ...]:
    """Sum `rows`, and the runs of the ops that make them.

    Layers with equal bytes and runs fold to one group. The group that holds most at the peak
    comes first; of equal ones, the largest.

    Parameters
    ----------
    rows : of `value_rows`, filtered or not. schedule : the one that they were made for.
    """
    sums: dict[str, _Sums] = {}
    for row in rows:
        _add(sums.setdefault(_name(row.module, row.target, row.source, by), _Sums()), row)
    runs = schedule.computations() if schedule else Counter[str]()
    for op in _ops_of(graph, rows):
        one = sums[_name(op.module, op.target, op.source, by)]
        again = max(runs[op.name] - 1, 0)
        one.cost_us += op.cost_us
        one.recomputed_us += again * op.cost_us
        one.figures["runs_again"] += again
    return tuple(sorted(_folded_groups(sums), key=_rank))


def _rank(group: Group) -> tuple[int, int, float]:
    return -group.at_peak_bytes, -group.size_bytes, -group.cost_us


def _name(module: str, target: str, source: str, by: By) -> str:
    return {"module": module, "op": target, "line": source}[by] or WITHOUT[by]


def _ops_of(graph: TrainingGraph, rows: Iterable[ValueRow]) -> list[Op]:
    return [graph.ops[graph.op_index[name]] for name in dict.fromkeys(row.op for row in rows)]


def _add(sums: _Sums, row: ValueRow) -> None:
    sums.figures["values"] += 1
    sums.figures["size_bytes"] += row.size_bytes
    if row.phase == "forward" and row.verdict in OF_VERDICT:
        sums.figures[OF_VERDICT[row.verdict]] += row.size_bytes
    if row.at_peak:
        sums.figures["at_peak_bytes"] += row.size_bytes


def _folded_groups(sums: dict[str, _Sums]) -> list[Group]:
    alike: dict[tuple[str, tuple[int, ...]], dict[Indices, _Sums]] = {}
    for name, one in sums.items():
        pattern, indices = split_indices(name)
        alike.setdefault((pattern, tuple(one.figures.values())), {})[indices] = one
    return [
        _group(written(pattern, box), inside(by_index, box))
        for (pattern, _), by_index in alike.items()
        for box in boxes(by_index)
    ]


def _group(name: str, parts: Sequence[_Sums]) -> Group:
    whole = {figure: sum(part.figures[figure] for part in parts) for figure in FIGURES}
    return Group(
        name=name,
        count=len(parts),
        cost_us=sum(part.cost_us for part in parts),
        recomputed_us=sum(part.recomputed_us for part in parts),
        **whole,
    )
