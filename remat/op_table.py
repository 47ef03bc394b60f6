"""What a plan does with each op: keep, drop or recompute, and what that is worth."""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph_capture.graph import Op, TrainingGraph
from remat.schedules.kept_in_forward import live_after_forward
from remat.schedules.schedule import Schedule


@dataclass(frozen=True)
class OpRow:
    """One op, with the size of what it makes and the verdict of a plan, if there is one.

    `verdict` is ``keep`` (live when forward ends), ``recompute xN`` (N runs beyond the
    first), ``free`` (neither: nothing in backward reads it) or, in backward, ``run``.
    """

    op: str
    target: str
    phase: str
    verdict: str
    runs: int
    size_bytes: int
    cost_us: float = 0.0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    module: str = ""
    source: str = ""


def rows_of_graph(graph: TrainingGraph, schedule: Schedule | None = None) -> list[OpRow]:
    """One row an op, largest first.

    Raises
    ------
    ScheduleError : the schedule was made for another graph.
    """
    if schedule is None:
        rows = [_row(graph, op, "", 1) for op in graph.ops]
        return sorted(rows, key=lambda row: -row.size_bytes)
    schedule.check_made_for(graph)
    runs, kept = schedule.computations(), live_after_forward(graph, schedule)
    rows = [_row(graph, op, _verdict(op, runs[op.name], kept), runs[op.name]) for op in graph.ops]
    return sorted(rows, key=lambda row: -row.size_bytes)


def _verdict(op: Op, runs: int, kept: frozenset[str]) -> str:
    if op.phase == "backward":
        return "run" if runs == 1 else f"recompute x{runs - 1}"
    if runs > 1:
        return f"recompute x{runs - 1}"
    return "keep" if kept.intersection(op.outputs) else "free"


def _row(graph: TrainingGraph, op: Op, verdict: str, runs: int) -> OpRow:
    values = [graph.value_by_name[name] for name in op.outputs]
    largest = max(values, key=lambda value: value.size_bytes, default=None)
    return OpRow(
        op=op.name,
        target=op.target,
        phase=op.phase,
        verdict=verdict,
        runs=runs,
        size_bytes=sum(value.size_bytes for value in values),
        cost_us=op.cost_us,
        dtype=largest.dtype if largest else "",
        shape=largest.shape if largest else (),
        module=op.module,
        source=op.source,
    )
