"""What `remat inspect` and `remat.inspect` return: the values of a step, and what a plan does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from remat.graph_capture.errors import GlobError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.schedules.verdicts.folding import FoldedRow, folded
from remat.schedules.verdicts.grouping import Group, grouped
from remat.schedules.verdicts.peak_holders import PeakHolders, peak_holders
from remat.schedules.verdicts.rows import ValueRow, matching, value_rows
from remat.solver.result import Result

Sums = Literal["value", "module", "op", "line"]


class Inspection(msgspec.Struct, frozen=True):
    """The values of a step, largest first, and the verdicts of a schedule, if there is one.

    Attributes
    ----------
    by : how `groups` are summed; ``value`` for no groups.
    prices : how costs were obtained, as the graph says. budget_bytes : 0 without one.
    time_us, overhead : of the schedule, from `simulate`; of every op once without one.
    at_peak : who holds the peak, None without a schedule.
    values : one a value, after filters. rows : the same, identical layers folded.
    """

    model: str
    device: str
    prices: str
    budget_bytes: int
    time_us: float
    overhead: float
    by: Sums
    at_peak: PeakHolders | None
    values: tuple[ValueRow, ...]
    rows: tuple[FoldedRow, ...]
    groups: tuple[Group, ...]

    @property
    def peak_bytes(self) -> int:
        """The schedule's peak, 0 without one."""
        return self.at_peak.peak_bytes if self.at_peak else 0

    def as_json(self) -> dict[str, Any]:
        """Plain bytes, microseconds and names, for `--json`."""
        return {**msgspec.to_builtins(self), "peak_bytes": self.peak_bytes}

    def __str__(self) -> str:
        from remat.questions.tables import inspection_screen, rendered

        return rendered(inspection_screen(self))

    __repr__ = __str__


def inspect(
    graph: TrainingGraph,
    plan: Schedule | Result | None = None,
    *,
    by: Sums = "value",
    only: str | Iterable[str] = (),
    at_peak: bool = False,
) -> Inspection:
    """What the step holds, and what a plan keeps, makes again, offloads and frees.

    Parameters
    ----------
    plan : a schedule or a result of `graph`; without one there are no verdicts.
    by : also sum the values by module, by op or by source line.
    only : globs over module paths, values, ops and source lines; a module's covers those below.
    at_peak : only values that are live at the plan's peak.

    Raises
    ------
    GlobError : a glob matches nothing, or `at_peak` is asked for without a plan.
    ScheduleError : the plan is not one of this graph.
    """
    schedule = plan.schedule if isinstance(plan, Result) else plan
    if at_peak and schedule is None:
        raise GlobError(
            "only values at the peak are asked for, and without a plan there is no peak: name one "
            "(--plan plan.json) or a budget (--budget 8GiB)"
        )
    rows = matching(value_rows(graph, schedule), (only,) if isinstance(only, str) else only)
    if at_peak:
        rows = tuple(row for row in rows if row.at_peak)
    found = simulate(graph, schedule) if schedule else None
    return Inspection(
        model=graph.name,
        device=graph.device,
        prices=graph.prices,
        budget_bytes=schedule.budget_bytes if schedule else 0,
        time_us=found.time_us if found else graph.time_us,
        overhead=found.overhead if found else 0.0,
        by=by,
        at_peak=peak_holders(graph, schedule, found) if schedule else None,
        values=rows,
        rows=tuple(sorted(folded(rows), key=_smaller)),
        groups=() if by == "value" else grouped(graph, schedule, rows, by),
    )


def _smaller(row: FoldedRow) -> tuple[int, float]:
    return -row.size_bytes, -row.cost_us
