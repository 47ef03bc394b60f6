"""The screens that a person reads: tables for `run`, `check` and `solve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat.checks import CHECKED, advice_of
from remat.formats import (
    NO_BOUND,
    bytes_pair,
    bytes_text,
    gap_text,
    percent_pair,
    percent_text,
    proved_text,
    time_pair,
    time_text,
)
from remat.graph_capture.devices.device_table import is_in_table
from remat.graph_capture.graph import TrainingGraph
from remat.job.advice import advice_on_run
from remat.job.pipeline import Report, RunsAgain
from remat.job.rows import Row
from remat.levers.offloaded import Offloaded, offloaded
from remat.questions.pieces import pieces_of
from remat.questions.reserved import reserved_beside, reserved_text
from remat.questions.tables import plain_table, prices_text
from remat.schedules.as_planned import as_planned
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import bound_of
from remat.schedules.simulation import Simulation
from remat.screen.stages import took_text
from remat.solver.kept import kinds_text
from remat.solver.result import Result

if TYPE_CHECKING:
    from remat.rewriter.checking.check import Check

HELD_ROWS = 3
OUTSIDE = "the loss and what is outside of modules"
LABELS = {"chen_sqrt": "square-root checkpointing"}
"""What a row is called on the screen, where a solver's name says nothing to a stranger."""


def show_run(console: Console, report: Report) -> None:
    """One screen: the three schedules, the bound, what holds the peak, what is equal."""
    graph, result = report.graph, report.result
    backward = len(graph.ops) - graph.n_forward
    ops = f", {graph.n_forward} forward and {backward} backward ops"
    budget = f", budget {bytes_text(result.budget_bytes)}\n"
    console.print(Text.assemble((graph.name, "bold"), ops, budget))
    console.print(schedules_table(report.rows))
    console.print()
    console.print(_verdict(report))


def schedules_table(rows: Iterable[Row]) -> Table:
    """One row a schedule, predicted beside measured."""
    table = plain_table("predicted | measured", "peak", "step", "overhead")
    for row in rows:
        overhead = percent_pair(row.overhead, row.measured_overhead)
        table.add_row(
            LABELS.get(row.name, row.name),
            bytes_pair(row.peak_bytes, row.measured_peak_bytes),
            time_pair(row.time_us, row.measured_step_us),
            "-" if row.name == "unmodified" else overhead,
        )
    return table


def _verdict(report: Report) -> Table:
    """Below the rows: bound, what holds the peak, what is equal, times, status."""
    result, graph, seconds = report.result, report.graph, report.seconds
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("lower bound", _bound_said(graph, result))
    if report.simulation:
        table.add_row("peak held by", _held(graph, result.schedule, report.simulation))
    _add_reserved(table, report.rows)
    for advice in advice_on_run(report):
        table.add_row("advice", Text(advice))
    if report.shortage:
        table.add_row("advice", Text(report.shortage))
    if report.check:
        table.add_row("equal", equal_text(report.check))
        for advice in advice_of(report.check, result.budget_bytes):
            table.add_row("advice", Text(advice))
    if report.unchecked:
        table.add_row("not run", Text(report.unchecked))
    _add_pieces(table, graph, result)
    _add_offloaded(table, offloaded(graph, result.schedule, report.simulation))
    _add_again(table, result, report.again)
    _add_prices(table, graph)
    table.add_row("took", took_text(seconds))
    style = "bold red" if report.failures else "bold green"
    table.add_row("status", Text.assemble((result.status, style), f", by {result.solver}"))
    if result.message:
        table.add_row("note", Text(result.message))
    return table


def _add_reserved(table: Table, rows: Iterable[Row]) -> None:
    """What the allocator of a CUDA device will hold, and what it held beside each peak."""
    known = {row.name: row for row in rows}
    plan, without = known.get("this plan"), known["unmodified"].reserved
    if plan is not None and plan.reserved is not None:
        table.add_row("reserved", reserved_text(plan.reserved, without))
    measured = [(row.name, row.reserved_bytes) for row in known.values()]
    said = [f"{LABELS.get(n, n)} {bytes_text(held)}" for n, held in measured if held is not None]
    if said:
        table.add_row("", f"measured: {', '.join(said)}")


def _add_pieces(table: Table, graph: TrainingGraph, result: Result) -> None:
    """What runs in pieces, and what that takes."""
    for one in pieces_of(graph, result.schedule):
        table.add_row("in pieces", Text(str(one)))


def _add_offloaded(table: Table, moved: Offloaded | None) -> None:
    """What moves to the host and back, where something does."""
    for name, said in moved.rows() if moved is not None else ():
        table.add_row(name, Text(said))


def _add_again(table: Table, result: Result, again: RunsAgain) -> None:
    """What runs again, how much of attention does, and whether whole layers would do."""
    kinds = kinds_text(again.kinds)
    if kinds:
        table.add_row("recomputed", Text(kinds))
    if result.attention:
        table.add_row("attention", str(result.attention))
    if again.simpler:
        table.add_row("simpler", str(again.simpler))


def _add_prices(table: Table, graph: TrainingGraph) -> None:
    """What is behind the figures, where that is not a measurement on this machine."""
    if is_in_table(graph.device) or graph.notes:
        table.add_row("prices", prices_text(graph))


def _bound_said(graph: TrainingGraph, result: Result) -> str:
    """The bound as an overhead, and the gap. That of every op once needs no proof: it says so."""
    bound = bound_of(result.lower_bound_us, graph.time_us)
    if bound is None or result.gap is None:
        return NO_BOUND
    is_proved = result.status == "optimal"
    of = "overhead at this budget" if bound or is_proved else "overhead (nothing computed twice)"
    return f"{percent_text(bound)} {of}; {gap_text(result.gap)}{', proved' if is_proved else ''}"


def _held(graph: TrainingGraph, schedule: Schedule | None, simulation: Simulation) -> str:
    """What is resident, and the modules whose values weigh most at the peak."""
    graph = as_planned(graph, schedule) if schedule else graph
    module = {op.name: op.module for op in graph.ops}
    held_bytes: Counter[str] = Counter()
    for name in simulation.held_at_peak:
        value = graph.value_by_name[name]
        held_bytes[module.get(value.producer) or OUTSIDE] += value.size_bytes
    heaviest = held_bytes.most_common(HELD_ROWS)
    parts = [f"resident {bytes_text(graph.resident.total_bytes)}"]
    parts += [f"{place} {bytes_text(size)}" for place, size in heaviest]
    rest = len(held_bytes) - len(heaviest)
    if rest:
        rest_bytes = held_bytes.total() - sum(size for _, size in heaviest)
        parts.append(f"{rest} more modules {bytes_text(rest_bytes)}")
    if simulation.workspace_at_peak_bytes:
        parts.append(f"workspace {bytes_text(simulation.workspace_at_peak_bytes)}")
    return ", ".join(parts)


def equal_text(check: Check) -> Text:
    """Which of outputs, gradients, buffers and RNG are bit-identical to eager's."""
    said = Text(f"{check.gradients} of {check.gradients_total} gradients bit-identical")
    for name in CHECKED:
        if name != "gradients":
            is_equal = getattr(check, f"{name}_equal")
            said.append(f", {name} ").append(*(("equal",) if is_equal else ("differ", "red")))
    return said


def show_check(console: Console, check: Check, budget_bytes: int) -> None:
    """What was equal, and the measured peaks and times."""
    table = plain_table("measured", "peak", "step", "overhead")
    table.add_row(
        "unmodified", bytes_text(check.baseline_peak_bytes), time_text(check.baseline_step_us), "-"
    )
    table.add_row(
        "this plan",
        bytes_text(check.plan_peak_bytes),
        time_text(check.plan_step_us),
        percent_text(check.overhead),
    )
    console.print(table)
    console.print(Text("\nequal  ").append(equal_text(check)))
    if check.plan_reserved_bytes is not None:
        console.print(f"reserved  {bytes_text(check.plan_reserved_bytes)}")
    for advice in advice_of(check, budget_bytes):
        console.print(f"advice  {advice}", markup=False)


def show_result(console: Console, graph: TrainingGraph, result: Result, again: RunsAgain) -> None:
    """One line a figure of a solve."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_row("status", f"{result.status}, by {result.solver} in {result.wall_s:.1f} s")
    table.add_row("budget", bytes_text(result.budget_bytes))
    table.add_row("peak", bytes_text(result.peak_bytes))
    table.add_row("step", time_text(result.time_us))
    table.add_row("overhead", percent_text(result.overhead))
    table.add_row("gap", proved_text(result.gap))
    _add_pieces(table, graph, result)
    _add_offloaded(table, offloaded(graph, result.schedule))
    reserved = reserved_beside(graph, result)
    if reserved is not None:
        table.add_row("reserved", reserved_text(reserved))
    _add_again(table, result, again)
    _add_prices(table, graph)
    if result.message:
        table.add_row("note", Text(result.message))
    console.print(table)
