"""What a schedule does with each value: one row a value, with its size, its place and its cost.

Verdicts are of values, not of ops: an op that runs again for one of its results makes the others
again only if they are not live.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import msgspec

from remat.graph_capture.errors import GlobError
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.schedules.derived import graph_of_schedule
from remat.schedules.kept_in_forward import live_after_forward
from remat.schedules.schedule import Compute, Offload, Schedule, fetched_value, freed_value
from remat.schedules.simulate import simulate
from remat.schedules.value_report.globs import EXAMPLES, modules_text, names_module


class ValueRow(msgspec.Struct, frozen=True):
    """One value that an op makes, and the verdict of a schedule, if there is one.

    Attributes
    ----------
    verdict : ``keep`` (live when forward ends), ``recompute``, ``offload``, ``free`` (made once,
        and not live when forward ends), or ``run`` for a value of backward. Empty without a
        schedule.
    again : how often it is made after the first time. size_bytes : of one copy.
    """

    value: str
    op: str
    target: str
    phase: str
    kind: str
    verdict: str
    again: int
    size_bytes: int
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
    made, moved = _times_made(graph, schedule), _offloaded(schedule)
    live = live_after_forward(graph, schedule)
    rows: list[ValueRow] = []
    for op, value in _made(graph):
        again = made[value.name] - 1
        verdict = _verdict(op, value.name, again, live, moved)
        rows.append(_row(op, value, verdict, again, at_peak=value.name in held))
    return tuple(rows)


def _times_made(graph: TrainingGraph, schedule: Schedule) -> dict[str, int]:
    graph = graph_of_schedule(graph, schedule)
    made = {value.name: 0 for value in graph.values if value.producer}
    live: set[str] = set()
    for step in schedule.steps:
        if isinstance(step, Compute):
            for name in graph.ops[graph.op_index[step.op]].outputs:
                # A live output is not made again: the second copy goes when the run ends.
                made[name] += name not in live
                live.add(name)
        else:
            live.update({fetched_value(step)} - {""})
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


def _offloaded(schedule: Schedule) -> set[str]:
    return {step.value for step in schedule.steps if isinstance(step, Offload)}


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
        value=value.name,
        op=op.name,
        target=op.target,
        phase=op.phase,
        kind=value.kind,
        verdict=verdict,
        again=again,
        size_bytes=value.size_bytes,
        cost_us=op.cost_us,
        cost_origin=op.cost_origin,
        dtype=value.dtype,
        shape=value.shape,
        module=op.module,
        source=op.source,
        at_peak=at_peak,
    )


def _is_named(row: ValueRow, glob: str) -> bool:
    names = (row.value, row.op, row.target, row.source)
    return names_module(glob, row.module) or any(fnmatchcase(name, glob) for name in names)


def _no_row_text(rows: Sequence[ValueRow], glob: str) -> str:
    modules = [module for module in dict.fromkeys(row.module for row in rows) if module]
    shown = modules_text(modules) if modules else "No op names its module"
    targets = list(dict.fromkeys(row.target for row in rows))
    ops = f"; ops are {', '.join(targets[:EXAMPLES])}, ..." if targets else ""
    return f"'{glob}' matches no module, value, op or source line of this graph. {shown}{ops}"
