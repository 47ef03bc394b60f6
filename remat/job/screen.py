"""The screens that a person reads: tables for `run` and `check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat.analysis.memory_figures import chunks_of, offloaded, reserved_text
from remat.analysis.plan_report import costs_text, step_facts
from remat.checks import advice_of
from remat.formats import (
    bytes_pair,
    bytes_text,
    percent_pair,
    percent_text,
    plain_table,
    time_pair,
    time_text,
)
from remat.graph_capture.devices.known_devices import is_in_table
from remat.graph_capture.graph import TrainingGraph
from remat.job.pipeline import RangeReport, Report, Row
from remat.plan import Plan
from remat.progress import took_text
from remat.ranges.curve import Curve
from remat.schedules.derived import graph_of_schedule
from remat.schedules.family import Family, sizes_text
from remat.schedules.outcome import CHECKED, FAR_OFF, Check, Result, bound_text, equal_text, verdict
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import Simulation, bound_of
from remat.solved import infeasible_text
from remat.solver.recompute_summary import kinds_text

_OFF = 0.1  # a measured overhead of the plan that is this far from the predicted one is told

_FASTER = 0.01  # a plan this much faster than the user's checkpoints is told


def advice_on_run(report: Report) -> tuple[str, ...]:
    needed = _no_plan(report.rows, report.result.budget_bytes)
    return (*needed, *(_far_apart(report.rows) or _off(report.rows[-1])))


def _no_plan(rows: tuple[Row, ...], budget_bytes: int) -> tuple[str, ...]:
    unmodified, plan = rows[0], rows[-1]
    if unmodified.peak_bytes > budget_bytes:
        return ()
    needs = f"the unmodified step needs {bytes_text(unmodified.peak_bytes)} and fits already"
    if plan.overhead < -_FASTER:
        return (
            f"{needs}, with checkpoints of its own. This plan computes less again: by costs it "
            f"takes {percent_text(-plan.overhead)} less time",
        )
    return (f"{needs}: train without a plan",)


def _far_apart(rows: tuple[Row, ...]) -> tuple[str, ...]:
    # Of all rows: one that was measured in a slow spell says little.
    measured = [(row.measured_step_us, row.time_us) for row in rows if row.time_us]
    ratios = [is_us / said_us for is_us, said_us in measured if is_us]
    if not ratios or (max(ratios) >= 1 / FAR_OFF and min(ratios) <= FAR_OFF):
        return ()
    worst = max(ratios) if min(ratios) > FAR_OFF else min(ratios)
    return (
        f"steps took {worst:.2f} times as long as predicted: the machine was busy, now or when ops "
        "were measured. On a quiet one, --measure-again measures them anew",
    )


def _off(plan: Row) -> tuple[str, ...]:
    measured = plan.measured_overhead  # only where steps took about as predicted
    if measured is None or abs(measured - plan.overhead) < _OFF:
        return ()
    return (
        f"the clock said {percent_text(measured)} overhead where costs say "
        f"{percent_text(plan.overhead)}: other programs that run meanwhile do that. Run it "
        "again on a quiet machine before you rely on either",
    )


_HELD_ROWS = 3
_OUTSIDE = "the loss and what is outside of modules"
_LABELS = {"chen_sqrt": "square-root checkpointing"}  # for solver names that say nothing


def show_run(console: Console, report: Report) -> None:
    graph, result = report.graph, report.result
    backward = len(graph.ops) - graph.n_forward
    ops = f", {graph.n_forward} forward and {backward} backward ops"
    budget = f", budget {bytes_text(result.budget_bytes)}\n"
    console.print(Text.assemble((graph.name, "bold"), ops, budget))
    console.print(_schedules_table(report.rows))
    console.print()
    console.print(_details(report))
    if result.schedule is not None:
        said = verdict(graph, report.rows[0].time_us, result, report.check)
        console.print(Text(f"\n{said}", "bold red" if report.failures else "bold green"))


def _schedules_table(rows: Iterable[Row]) -> Table:
    table = plain_table("predicted | measured", "peak", "step", "overhead")
    for row in rows:
        peak = bytes_pair(row.peak_bytes, row.measured_peak_bytes)
        step = time_pair(row.time_us, row.measured_step_us)
        is_base = row.name == "unmodified"  # of the unmodified step it is 0 by definition
        overhead = "-" if is_base else percent_pair(row.overhead, row.measured_overhead)
        table.add_row(_LABELS.get(row.name, row.name), peak, step, overhead)
    return table


def _details(report: Report) -> Table:
    result, graph, seconds = report.result, report.graph, report.seconds
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("lower bound", bound_text(graph, result))
    if report.simulation:
        table.add_row("peak held by", _held(graph, result.schedule, report.simulation))
    _add_reserved(table, report.rows)
    for advice in filter(None, (*advice_on_run(report), report.shortage)):
        table.add_row("advice", Text(advice))
    _add_check(table, report, result.budget_bytes)
    _add_ways(table, report)
    if is_in_table(graph.device) or graph.notes:  # the figures are no measurement on this machine
        table.add_row("costs", costs_text(graph))
    table.add_row("took", took_text(seconds))
    table.add_row("status", Text(f"{result.status}, by {result.solver}"))
    if result.message:
        table.add_row("note", Text(result.message))
    return table


def _add_check(table: Table, report: Report | RangeReport, budget_bytes: int, at: str = "") -> None:
    if report.check:
        table.add_row("equal", f"{equal_text(report.check)}{at}")
        for advice in advice_of(report.check, budget_bytes):
            table.add_row("advice", Text(advice))
    if report.unchecked:
        table.add_row("not run", Text(report.unchecked))


def _add_reserved(table: Table, rows: Iterable[Row]) -> None:
    known = {row.name: row for row in rows}
    plan, without = known.get("this plan"), known["unmodified"].reserved
    if plan is not None and plan.reserved is not None:  # a CPU's allocator reserves nothing
        table.add_row("reserved", reserved_text(plan.reserved, without))
    measured = [(row.name, row.reserved_bytes) for row in known.values()]
    said = [f"{_LABELS.get(n, n)} {bytes_text(held)}" for n, held in measured if held is not None]
    if said:
        table.add_row("", f"measured: {', '.join(said)}")


def _add_ways(table: Table, report: Report) -> None:
    graph, result = report.graph, report.result
    for one in chunks_of(graph, result.schedule):
        table.add_row("in chunks", Text(str(one)))
    moved = offloaded(graph, result.schedule, report.simulation)
    for name, said in moved.rows() if moved is not None else ():
        table.add_row(name, Text(said))
    if kinds := kinds_text(report.kinds):
        table.add_row("recomputed", Text(kinds))
    if result.attention:
        table.add_row("attention", str(result.attention))
    if report.simpler:
        table.add_row("simpler", str(report.simpler))


def _held(graph: TrainingGraph, schedule: Schedule | None, simulation: Simulation) -> str:
    # Values of chunks are none of the captured graph.
    graph = graph_of_schedule(graph, schedule) if schedule else graph
    module = {op.name: op.module for op in graph.ops}
    held_bytes: Counter[str] = Counter()
    for name in simulation.held_at_peak:
        value = graph.value_by_name[name]
        held_bytes[module.get(value.producer) or _OUTSIDE] += value.size_bytes
    heaviest = held_bytes.most_common(_HELD_ROWS)
    parts = [f"resident {bytes_text(graph.resident.total_bytes)}"]
    parts += [f"{place} {bytes_text(size)}" for place, size in heaviest]
    rest = len(held_bytes) - len(heaviest)
    if rest:
        rest_bytes = held_bytes.total() - sum(size for _, size in heaviest)
        parts.append(f"{rest} more modules {bytes_text(rest_bytes)}")
    if simulation.workspace_at_peak_bytes:
        parts.append(f"workspace {bytes_text(simulation.workspace_at_peak_bytes)}")
    return ", ".join(parts)


def show_check(console: Console, check: Check, budget_bytes: int) -> None:
    table = plain_table("measured", "peak", "step", "overhead")
    for name, peak_bytes, step_us, overhead in (
        ("unmodified", check.baseline_peak_bytes, check.baseline_step_us, "-"),
        ("this plan", check.plan_peak_bytes, check.plan_step_us, percent_text(check.overhead)),
    ):
        table.add_row(name, bytes_text(peak_bytes), time_text(step_us), overhead)
    console.print(table)
    console.print(f"\nequal  {equal_text(check)}")
    if check.plan_reserved_bytes is not None:
        console.print(f"reserved  {bytes_text(check.plan_reserved_bytes)}")
    for advice in advice_of(check, budget_bytes):
        console.print(f"advice  {advice}", markup=False)


# What the command line prints with `--json`: plain bytes, microseconds and names.


def report_json(report: Report) -> dict[str, Any]:
    result, rows = report.result, {row.name: row for row in report.rows}
    attention = result.attention
    said = {
        "status": result.status,
        "solver": result.solver,
        "budget_bytes": result.budget_bytes,
        "model": report.graph.name,
        "ops": len(report.graph.ops),
        "device": report.graph.device,
        "prices": report.graph.cost_origin,  # keys keep the names of older releases
        "price_notes": report.graph.notes,
        "baseline": _row_json(rows["unmodified"]),
        "chen_sqrt": _row_json(rows["chen_sqrt"]),
        "plan": _row_json(rows["this plan"]) if "this plan" in rows else None,
        "bound": bound_json(report.graph, result),
        "message": result.message,
        "pieces": msgspec.to_builtins(chunks_of(report.graph, result.schedule)),
        "offload": msgspec.to_builtins(offloaded(report.graph, result.schedule)),
        "recomputed": [kind._asdict() for kind in report.kinds if kind.recomputed],
        "attention": attention and {**msgspec.to_builtins(attention), "says": str(attention)},
        "floor": msgspec.to_builtins(result.floor),
        "every_n_layers": msgspec.to_builtins(report.simpler),
        "check": _check_json(report.check, result.budget_bytes) if report.check else None,
        "unchecked": report.unchecked,
        "shortage": report.shortage,
        "advice": advice_on_run(report),
        "failures": report.failures,
        "seconds": {name: round(value, 3) for name, value in report.seconds.items()},
    }
    if result.schedule is None:
        said |= _infeasible_json(result)
    return said


def bound_json(graph: TrainingGraph, result: Result) -> dict[str, float | None]:
    """None stands for what is not proved."""
    overhead = bound_of(result.lower_bound_us, graph.time_us)
    bound_us = None if overhead is None else result.lower_bound_us
    return {"lower_bound_us": bound_us, "overhead": overhead, "gap": result.gap}


def _check_json(check: Check, budget_bytes: int) -> dict[str, Any]:
    equal = {f"{name}_equal": bool(getattr(check, f"{name}_equal")) for name in CHECKED}
    return {
        **equal,
        "gradients": check.gradients,
        "gradients_total": check.gradients_total,
        "unsteady": check.unsteady,
        "advice": advice_of(check, budget_bytes),
    }


def checked_json(check: Check, budget_bytes: int, failures: list[str]) -> dict[str, Any]:
    measured: dict[str, dict[str, Any]] = {
        name: {
            "measured_peak_bytes": getattr(check, f"{name}_peak_bytes"),
            "reserved_bytes": getattr(check, f"{name}_reserved_bytes"),
            "measured_step_us": getattr(check, f"{name}_step_us"),
        }
        for name in ("baseline", "plan")
    }
    measured["plan"]["measured_overhead"] = check.overhead
    known = {"budget_bytes": budget_bytes, "check": _check_json(check, budget_bytes)}
    return known | measured | {"failures": failures}


def _infeasible_json(result: Result) -> dict[str, Any]:
    names = "name", "size_bytes", "module"
    return {
        "least_feasible_bytes": result.least_feasible_bytes,
        "held_at_peak": [{n: getattr(v, n) for n in names} for v in result.held_at_peak],
        "error": {"type": "Infeasible", "message": infeasible_text(result)},
    }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "predicted_peak_bytes": row.peak_bytes,
        "measured_peak_bytes": row.measured_peak_bytes,
        "predicted_reserved": msgspec.to_builtins(row.reserved),
        "reserved_bytes": row.reserved_bytes,
        "predicted_step_us": row.time_us,
        "measured_step_us": row.measured_step_us,
        "overhead": row.overhead,
        "measured_overhead": row.measured_overhead,
    }


def show_range_report(console: Console, report: RangeReport) -> None:
    show_family(console, report.family, report.curve)
    table = Table.grid(padding=(0, 2, 0, 0))
    at = f" at {sizes_text(report.sizes)}" if report.sizes else ""
    _add_check(table, report, report.family.budget_bytes, at)
    table.add_row("took", took_text(report.seconds))
    console.print(table)
    plan = Plan.from_family(report.family, report.graph)
    facts = step_facts(
        report.graph.bounding(report.graph.symbols), plan, report.check, is_range=True
    )
    console.print(Text(f"\n{facts.verdict}", "bold red" if report.failures else "bold green"))


def show_family(console: Console, family: Family, curve: Curve) -> None:
    ranges, budget = ", ".join(map(str, family.symbols)), bytes_text(family.budget_bytes)
    console.print(Text.assemble((family.model, "bold"), f" over {ranges}, budget {budget}\n"))
    table = plain_table("sizes", "schedule", "peak", "step", "overhead")
    for point in curve.points:
        number = str(point.member + 1)  # people count from 1
        figures = bytes_text(point.peak_bytes), time_text(point.time_us)
        table.add_row(sizes_text(point.sizes), number, *figures, percent_text(point.overhead))
    console.print(table)
    console.print()
    table = Table.grid(padding=(0, 2, 0, 0))
    said = f"no size needs more than {bytes_text(family.peak_bytes)}, by the {family.certificate}"
    table.add_row("certificate", Text(said))
    bound, top = percent_text(family.top.lower_overhead), sizes_text(family.top.sizes)
    table.add_row("lower bound", f"{bound} overhead at this budget at {top}")
    off = percent_text(family.cost_error)
    table.add_row("costs", f"of three sizes, fitted between; {off} off at the middle")
    console.print(table)


def range_json(family: Family, curve: Curve) -> dict[str, Any]:
    names = "sizes", "corners", "peak_bytes", "overhead", "lower_overhead"
    return {
        "symbols": msgspec.to_builtins(family.symbols),
        "budget_bytes": family.budget_bytes,
        "peak_bytes": family.peak_bytes,
        "certificate": family.certificate,
        "prices_error": family.cost_error,
        "schedules": [{name: getattr(one, name) for name in names} for one in family.members],
        "curve": msgspec.to_builtins(curve.points),
    }


def range_report_json(report: RangeReport) -> dict[str, Any]:
    family = report.family
    return {
        "model": family.model,
        "budget_bytes": family.budget_bytes,
        "range": range_json(family, report.curve),
        "sizes": report.sizes,
        "check": _check_json(report.check, family.budget_bytes) if report.check else None,
        "unchecked": report.unchecked,
        "failures": report.failures,
        "seconds": {name: round(value, 3) for name, value in report.seconds.items()},
    }
