"""What a schedule does with each value, one row a value; and rows folded by layer, and grouped.

Of values, not ops: an op that runs again makes a result again only if that is not live.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

import msgspec

from remat.graph_capture.errors import GlobError
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.schedules.derived import graph_of_schedule
from remat.schedules.kept_in_forward import live_after_forward
from remat.schedules.schedule import Compute, Offload, Schedule, arriving_values, freed_value
from remat.schedules.simulate import simulate
from remat.schedules.value_report.globs import EXAMPLES, modules_text, names_module


class ValueRow(msgspec.Struct, frozen=True):
    """One value that an op makes, and the verdict of a schedule, if there is one."""

    value: str
    op: str
    target: str
    phase: str
    kind: str
    # ``keep`` is live as forward ends, ``free`` not, ``run`` of backward; empty without a schedule.
    verdict: str
    again: int  # how often it is made after the first time
    size_bytes: int  # of one copy
    cost_us: float
    cost_origin: str = msgspec.field(name="price")
    dtype: str
    shape: tuple[int, ...]
    module: str
    source: str
    at_peak: bool

    @property
    def verdict_text(self) -> str:
        """``recompute x2``."""
        return f"{self.verdict} x{self.again}" if self.again else self.verdict


def value_rows(graph: TrainingGraph, schedule: Schedule | None = None) -> tuple[ValueRow, ...]:
    if schedule is None:
        return tuple(_row(op, value, "", 0, at_peak=False) for op, value in _made(graph))
    graph = graph_of_schedule(graph, schedule)
    held = set(simulate(graph, schedule).held_at_peak)
    made, live = _times_made(graph, schedule), live_after_forward(graph, schedule)
    moved = {step.value for step in schedule.steps if isinstance(step, Offload)}
    rows: list[ValueRow] = []
    for op, value in _made(graph):
        again = made[value.name] - 1
        verdict = _verdict(op, value.name, again, live, moved)
        rows.append(_row(op, value, verdict, again, at_peak=value.name in held))
    return tuple(rows)


def _times_made(graph: TrainingGraph, schedule: Schedule) -> dict[str, int]:
    made = {value.name: 0 for value in graph.values if value.producer}
    live: set[str] = set()
    for step in schedule.steps:
        for name in arriving_values(graph, step):
            # A live output is not made again: its second copy goes.
            if isinstance(step, Compute) and name not in live:
                made[name] += 1
            live.add(name)
        live.discard(freed_value(step))
    return made


def matching(rows: Sequence[ValueRow], globs: Iterable[str]) -> tuple[ValueRow, ...]:
    """The rows that a glob names by value, op, source line or module; all without globs."""
    asked = tuple(globs)
    for glob in asked:
        if not any(_is_named(row, glob) for row in rows):
            raise GlobError(_no_row_text(rows, glob))
    return tuple(row for row in rows if not asked or any(_is_named(row, glob) for glob in asked))


def _made(graph: TrainingGraph) -> Iterable[tuple[Op, Value]]:
    return ((op, graph.value_by_name[name]) for op in graph.ops for name in op.outputs)


def _verdict(op: Op, name: str, again: int, live: frozenset[str], moved: set[str]) -> str:
    if name in moved:
        return "offload"
    if again:
        return "recompute"
    if op.phase == "backward":
        return "run"
    return "keep" if name in live else "free"


def _row(op: Op, value: Value, verdict: str, again: int, *, at_peak: bool) -> ValueRow:
    return ValueRow(
        value=value.name, op=op.name, target=op.target, phase=op.phase, kind=value.kind,
        verdict=verdict, again=again, size_bytes=value.size_bytes, cost_us=op.cost_us,
        cost_origin=op.cost_origin, dtype=value.dtype, shape=value.shape, module=op.module,
        source=op.source, at_peak=at_peak,
    )  # fmt: skip


def _is_named(row: ValueRow, glob: str) -> bool:
    names = (row.value, row.op, row.target, row.source)
    return names_module(glob, row.module) or any(fnmatchcase(name, glob) for name in names)


def _no_row_text(rows: Sequence[ValueRow], glob: str) -> str:
    modules = [module for module in dict.fromkeys(row.module for row in rows) if module]
    shown = modules_text(modules) if modules else "No op names its module"
    targets = list(dict.fromkeys(row.target for row in rows))
    ops = f"; ops are {', '.join(targets[:EXAMPLES])}, ..." if targets else ""
    return f"'{glob}' matches no module, value, op or source line of this graph. {shown}{ops}"


# Values and runs summed by module, by op or by source line, equal layers folded.

_INDEX = "#"  # what stands for an index in the pattern of a path
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
    if whole == [()]:  # a path without indices
        yield ()
        return
    tails: dict[int, list[Indices]] = {}
    for first, *rest in whole:
        tails.setdefault(first, []).append(tuple(rest))
    # Joins outer indices with the same inner ones: ``stages.0-3.0-1`` stays whole.
    firsts: dict[tuple[Indices, ...], list[int]] = {}
    for first, inner in tails.items():
        firsts.setdefault(tuple(inner), []).append(first)
    for inner, outer in firsts.items():
        for box in boxes(inner):
            yield (tuple(outer), *box)


def _folded(keyed: Iterable[tuple[str, Hashable, _T]]) -> Iterator[tuple[str, list[_T]]]:
    """Things of one key whose paths differ in indices alone, by the path of each product."""
    alike: dict[tuple[str, Hashable], dict[Indices, _T]] = {}
    for path, key, one in keyed:
        pattern, indices = split_indices(path)
        alike.setdefault((pattern, key), {})[indices] = one
    for (pattern, _), by_index in alike.items():
        for box in boxes(by_index):
            inside = (all(i in part for i, part in zip(at, box, strict=True)) for at in by_index)
            yield written(pattern, box), list(itertools.compress(by_index.values(), inside))


def written(pattern: str, box: tuple[tuple[int, ...], ...]) -> str:
    """The path of a product: ``stages.0-3.0-1.conv1``."""
    parts = iter(box)
    return ".".join(
        ranges_text(next(parts)) if one == _INDEX else one for one in pattern.split(".")
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
    """What the ops of one module, kind or line make, and what they do again."""

    name: str
    count: int  # how many layers are folded in it
    values: int
    size_bytes: int  # of one copy of each of its `values`
    kept_bytes: int  # of those with that verdict in forward, as the next two
    recomputed_bytes: int
    offloaded_bytes: int
    at_peak_bytes: int
    cost_us: float  # of one run of each op
    runs_again: int  # after the first
    recomputed_us: float  # of these runs


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
    for name in dict.fromkeys(row.op for row in rows):  # an op with several values runs once
        op = graph.ops[graph.op_index[name]]
        one = sums[_name(op.module, op.target, op.source, by)]
        again = max(runs[op.name] - 1, 0)
        one.cost_us += op.cost_us
        one.recomputed_us += again * op.cost_us
        one.figures["runs_again"] += again
    # Times may differ between layers, and are added up.
    keyed = ((name, tuple(one.figures.values()), one) for name, one in sums.items())
    groups = [_group(name, parts) for name, parts in _folded(keyed)]
    return tuple(sorted(groups, key=lambda g: (-g.at_peak_bytes, -g.size_bytes, -g.cost_us)))


def _name(module: str, target: str, source: str, by: GroupBy) -> str:
    return {"module": module, "op": target, "line": source}[by] or _WITHOUT[by]


def _add(sums: _Sums, row: ValueRow) -> None:
    sums.figures["values"] += 1
    sums.figures["size_bytes"] += row.size_bytes
    if row.phase == "forward" and row.verdict in _OF_VERDICT:
        sums.figures[_OF_VERDICT[row.verdict]] += row.size_bytes
    if row.at_peak:
        sums.figures["at_peak_bytes"] += row.size_bytes


def _group(name: str, parts: Sequence[_Sums]) -> Group:
    whole = {figure: sum(part.figures[figure] for part in parts) for figure in _FIGURES}
    return Group(
        name=name, count=len(parts), cost_us=sum(part.cost_us for part in parts),
        recomputed_us=sum(part.recomputed_us for part in parts), **whole,
    )  # fmt: skip


class FoldedRow(msgspec.Struct, frozen=True):
    """Rows that differ only in their names and in the indices of their module path."""

    module: str
    count: int
    first: ValueRow
    size_bytes: int  # of one copy each, in all
    cost_us: float  # of one run each, in all
    recomputed_us: float  # of later runs
    values: tuple[str, ...]


def fold_rows(rows: Sequence[ValueRow]) -> tuple[FoldedRow, ...]:
    # The n-th value of an op folds with the n-th of other layers.
    numbered = zip(rows, _ordinals(rows), strict=True)
    keyed = ((row.module, (ordinal, _facts(row)), row) for row, ordinal in numbered)
    found = [_folded_row(module, alike) for module, alike in _folded(keyed)]
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
    return (  # costs are left out: they may differ between layers, and are added up
        row.target, row.phase, row.kind, row.verdict, row.again, row.size_bytes, row.dtype,
        row.shape, row.source, row.at_peak, row.cost_origin,
    )  # fmt: skip


def _folded_row(module: str, rows: Sequence[ValueRow]) -> FoldedRow:
    return FoldedRow(
        module=module, count=len(rows), first=rows[0], values=tuple(row.value for row in rows),
        size_bytes=sum(row.size_bytes for row in rows), cost_us=sum(row.cost_us for row in rows),
        recomputed_us=sum(row.again * row.cost_us for row in rows),
    )  # fmt: skip
