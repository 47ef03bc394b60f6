"""Makes the answer of `inspect`: the values of a step, and what a plan does with each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from remat.analysis.plan_report import (
    run_cost_text,
    short_line,
    short_path,
    short_target,
    tensor_text,
    verdict_text,
)
from remat.formats import (
    Answer,
    bytes_text,
    fine_time_text,
    percent_text,
    plain_table,
    time_text,
)
from remat.graph_capture.errors import GlobError, option
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.derived import graph_of_schedule
from remat.schedules.outcome import Result
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.schedules.value_report.peak_holders import PeakHolders, peak_holders
from remat.schedules.value_report.rows import (
    FoldedRow,
    ValueRow,
    fold_rows,
    group_rows,
    matching,
    value_rows,
)
from remat.schedules.value_report.rows import Group as Sums

_WIDE = 110  # columns of the screen from which each fact has a column of its own
_ROOMY = 76  # columns of the screen from which the runs of a group are counted too
_TOP = 20  # rows that are shown unless more are asked for

InspectBy = Literal["value", "module", "op", "line"]  # ``value`` for one row a value


class Inspection(Answer, frozen=True):
    """The values of a step, largest first, and the verdicts of a schedule, if there is one."""

    model: str
    device: str
    cost_origin: str = msgspec.field(name="prices")  # the key of older releases
    budget_bytes: int  # 0 without a schedule
    time_us: float  # of every op once without a schedule
    overhead: float
    by: InspectBy  # how `groups` are summed; ``value`` for no groups
    at_peak: PeakHolders | None  # None without a schedule
    values: tuple[ValueRow, ...]  # one row a value, after filters
    rows: tuple[FoldedRow, ...]  # the same, identical layers folded
    groups: tuple[Sums, ...]

    @property
    def peak_bytes(self) -> int:
        return self.at_peak.peak_bytes if self.at_peak else 0

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "peak_bytes": self.peak_bytes}

    def screen(self, width: int = 100, top: int = _TOP) -> RenderableType:
        count = len(self.rows if self.by == "value" else self.groups)
        more = f"{count - top} smaller rows left out: {option('top', count)}"
        left_out = Text(more if count > top else "", style="dim")
        if self.by != "value":
            return Group(_step_line(self), Text(), _groups_table(self, top, width), left_out)
        # In a narrow terminal a row takes up to three lines, so that nothing is cut.
        table = _wide_values if width >= _WIDE else _narrow_values
        marked = Text("* live at the peak" if self.at_peak else "", style="dim")
        return Group(_step_line(self), Text(), table(self.rows[:top]), marked, left_out)


def _step_line(found: Inspection) -> Text:
    line = Text.assemble((found.model, "bold"), f", {found.cost_origin} on {found.device}")
    if found.at_peak is None:
        return line.append(f", {time_text(found.time_us)} a step with nothing recomputed")
    budget = f" of {bytes_text(found.budget_bytes)}" if found.budget_bytes else ""
    line.append(
        f": peak {bytes_text(found.peak_bytes)}{budget}, {time_text(found.time_us)} a step, "
        f"{percent_text(found.overhead)} overhead"
    )
    return line


def _wide_values(rows: Iterable[FoldedRow]) -> Table:
    table = plain_table("op", "layers", "verdict", "bytes", "one run", "dtype", "module", "line")
    for i in (2, 5, 6, 7):  # columns of words; `plain_table` aligns to the right, as for figures
        table.columns[i].justify = "left"
    for row in rows:
        table.add_row(
            Text(short_target(row.first.target)), f"x{row.count}" if row.count > 1 else "",
            verdict_text(row), bytes_text(row.size_bytes), run_cost_text(row),
            Text(tensor_text(row)), Text(short_path(row.module)),
            Text(short_line(row.first.source)),
        )  # fmt: skip
    return table


def _narrow_values(rows: Iterable[FoldedRow]) -> Table:
    table = plain_table("op, module, tensor", "verdict", "bytes", "one run")
    table.columns[1].justify = "left"
    for row in rows:
        count = f" x{row.count}" if row.count > 1 else ""
        lines = [short_target(row.first.target) + count]
        place = " ".join(filter(None, (short_path(row.module), short_line(row.first.source))))
        lines += [f"  {line}" for line in (place, tensor_text(row)) if line]
        cell = Text("\n").join([Text(lines[0]), *(Text(line, style="dim") for line in lines[1:])])
        table.add_row(cell, verdict_text(row), bytes_text(row.size_bytes), run_cost_text(row))
    return table


def _groups_table(found: Inspection, top: int, width: int) -> Table:
    if found.at_peak is None:  # without a plan there are sizes and costs alone
        table = plain_table(found.by, "values", "bytes", "time")
        for group in found.groups[:top]:
            sizes = bytes_text(group.size_bytes), fine_time_text(group.cost_us)
            table.add_row(_group_name(group), str(group.values), *sizes)
        return table
    runs = ("runs again",) if width >= _ROOMY else ()
    table = plain_table(found.by, "at peak", "kept", "again", *runs, "time again")
    for group in found.groups[:top]:
        figures = (group.at_peak_bytes, group.kept_bytes, group.recomputed_bytes)
        table.add_row(
            _group_name(group),
            *(bytes_text(size) if size else "-" for size in figures),
            *((str(group.runs_again) if group.runs_again else "-",) if runs else ()),
            fine_time_text(group.recomputed_us) if group.runs_again else "-",
        )
    return table


def _group_name(group: Sums) -> Text:
    count = f" x{group.count}" if group.count > 1 else ""
    return Text(f"{short_path(short_line(group.name))}{count}")


def inspect(
    graph: TrainingGraph, plan: Schedule | Result | None = None, *, by: InspectBy = "value",
    only: str | Iterable[str] = (), at_peak: bool = False,
) -> Inspection:  # fmt: skip
    schedule = plan.schedule if isinstance(plan, Result) else plan
    if at_peak and schedule is None:
        raise GlobError(
            f"name a plan ({option('plan')}) or a budget ({option('budget', '8GiB')}): only "
            "values at the peak are asked for, and without a plan there is no peak"
        )
    # Chunks and levers have values that the captured graph lacks.
    graph = graph_of_schedule(graph, schedule) if schedule else graph
    rows = matching(value_rows(graph, schedule), (only,) if isinstance(only, str) else only)
    if at_peak:
        rows = tuple(row for row in rows if row.at_peak)
    # Folding adds sizes up, so the order is another one than that of values.
    folded = sorted(fold_rows(rows), key=lambda row: (-row.size_bytes, -row.cost_us))
    found = simulate(graph, schedule) if schedule else None
    return Inspection(
        model=graph.name, device=graph.device, cost_origin=graph.cost_origin,
        budget_bytes=schedule.budget_bytes if schedule else 0,
        time_us=found.time_us if found else graph.time_us,
        overhead=found.overhead if found else 0.0, by=by,
        at_peak=peak_holders(graph, schedule, found) if schedule else None,
        values=rows, rows=tuple(folded),
        groups=() if by == "value" else group_rows(graph, schedule, rows, by),
    )  # fmt: skip
