"""Makes the answer of `inspect`: the values of a step, and what a plan does with each."""

from __future__ import annotations

from collections.abc import Iterable

from remat.graph_capture.errors import GlobError, option
from remat.graph_capture.graph import TrainingGraph
from remat.questions.inspection import By, Inspection
from remat.schedules.as_planned import as_planned
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.schedules.verdicts.folding import FoldedRow, folded
from remat.schedules.verdicts.grouping import grouped
from remat.schedules.verdicts.peak_holders import peak_holders
from remat.schedules.verdicts.rows import matching, value_rows
from remat.solver.result import Result


def inspect(
    graph: TrainingGraph,
    plan: Schedule | Result | None = None,
    *,
    by: By = "value",
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
            f"({option('plan')}) or a budget ({option('budget', '8GiB')})"
        )
    graph = as_planned(graph, schedule) if schedule else graph
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
