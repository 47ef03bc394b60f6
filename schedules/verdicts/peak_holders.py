"""What holds the memory at the peak of a schedule; its parts sum to the peak."""

from __future__ import annotations

import msgspec

from remat.graph_capture.graph import Op, TrainingGraph
from remat.schedules.as_planned import as_planned
from remat.schedules.schedule import Compute, Schedule
from remat.schedules.simulate import simulate
from remat.schedules.simulation import Simulation
from remat.schedules.verdicts.folding import FoldedRow, folded
from remat.schedules.verdicts.rows import value_rows


class PeakHolders(msgspec.Struct, frozen=True):
    """What is live at the moment of the peak.

    Attributes
    ----------
    peak_bytes, step : from `simulate`; `step` is the index of the step that reaches the peak.
    op, target, phase, module, source : of the op that runs then. run : which run of it, from 1.
    resident : bytes by category, without those of 0. workspace_bytes : of that op.
    copies_bytes : second copies that it makes of values that are live already.
    values : the values that are live, equal layers folded, largest first.
    """

    peak_bytes: int
    step: int
    op: str
    target: str
    phase: str
    module: str
    source: str
    run: int
    resident: dict[str, int]
    workspace_bytes: int
    copies_bytes: int
    values: tuple[FoldedRow, ...]

    @property
    def place(self) -> str:
        """Module path and source line of the op at the peak."""
        return " ".join(part for part in (self.module, self.source) if part) or self.op


def peak_holders(
    graph: TrainingGraph, schedule: Schedule, simulation: Simulation | None = None
) -> PeakHolders:
    """What holds the memory at the peak.

    Parameters
    ----------
    simulation : of that schedule, if at hand.

    Raises
    ------
    ScheduleError : the schedule is not valid on this graph.
    """
    graph = as_planned(graph, schedule)
    found = simulation or simulate(graph, schedule)
    step = schedule.steps[found.peak_step]
    op = graph.ops[graph.op_index[step.op]] if isinstance(step, Compute) else None
    rows = tuple(row for row in value_rows(graph, schedule) if row.at_peak)
    resident = {
        name.removesuffix("_bytes"): size
        for name, size in msgspec.structs.asdict(graph.resident).items()
        if size
    }
    known = sum(resident.values()) + sum(row.size_bytes for row in rows)
    return PeakHolders(
        peak_bytes=found.peak_bytes,
        step=found.peak_step,
        op=op.name if op else "",
        target=op.target if op else "",
        phase=op.phase if op else "",
        module=op.module if op else "",
        source=op.source if op else "",
        run=_runs_until(schedule, op, found.peak_step),
        resident=resident,
        workspace_bytes=found.workspace_at_peak_bytes,
        copies_bytes=found.peak_bytes - known - found.workspace_at_peak_bytes,
        values=tuple(sorted(folded(rows), key=_smaller)),
    )


def _runs_until(schedule: Schedule, op: Op | None, step: int) -> int:
    if op is None:
        return 0
    return sum(one == Compute(op.name) for one in schedule.steps[: step + 1])


def _smaller(one: FoldedRow) -> int:
    return -one.size_bytes
