"""What `run` and `check` answer: on the screen, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from remat.analysis.plan_figures import chunks_of, offloaded, reserved_text, too_small_host
from remat.analysis.plan_report import costs_text, step_facts
from remat.checks import advice_of
from remat.formats import (
    bytes_pair,
    bytes_text,
    percent_pair,
    percent_text,
    plain_table,
    rows_table,
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
from remat.solved import budget_said, infeasible_text
from remat.solver.recompute_summary import kinds_text

_OFF = 0.1  # a measured overhead of the plan that is this far from the predicted one is told

_FASTER = 0.01  # a plan this much faster than the user's checkpoints is told


def advice_on_run(report: Report) -> tuple[str, ...]:
    needed = _no_plan(report)
    return (*needed, *(_far_apart(report.rows) or _off(report.rows[-1])))


def _no_plan(report: Report) -> tuple[str, ...]:
    unmodified, plan = report.rows[0], report.rows[-1]
    needed_bytes = max(unmodified.peak_bytes, report.unmodified_reserved_bytes)
    if needed_bytes > report.result.budget_bytes:
        return ()
    needs = f"the unmodified step needs {bytes_text(needed_bytes)} and fits already"
    if plan.overhead < -_FASTER:
        return (
            f"{needs}, with checkpoints of its own. This plan recomputes less: by costs it takes "
            f"{percent_text(-plan.overhead)} less time",
        )
    return (f"train without a plan: {needs}",)


def _far_apart(rows: tuple[Row, ...]) -> tuple[str, ...]:
    # Of all rows: one that was measured in a slow spell says little.
    measured = [(row.measured_step_us, row.time_us) for row in rows if row.time_us]
    ratios = [is_us / said_us for is_us, said_us in measured if is_us]
    if not ratios or (max(ratios) >= 1 / FAR_OFF and min(ratios) <= FAR_OFF):
        return ()
    worst = max(ratios) if min(ratios) > FAR_OFF else min(ratios)
    return (
        f"run again on a quiet machine, with --measure-again: steps took {worst:.2f} times as "
        "long as predicted, so the machine was busy, now or when ops were measured",
    )


def _off(plan: Row) -> tuple[str, ...]:
    measured = plan.measured_overhead  # only where steps took about as predicted
    if measured is None or abs(measured - plan.overhead) < _OFF:
        return ()
    return (
        "run again on a quiet machine before you rely on either: the clock says "
        f"{percent_text(measured)} overhead where costs say {percent_text(plan.overhead)}, as "
        "happens when other programs run",
    )


_HELD_ROWS = 3
_OUTSIDE = "the loss and what is outside modules"
_LABELS = {"chen_sqrt": "square-root checkpointing"}  # for solver names that say nothing


_Said = Iterator[tuple[str, str | Text]]


def run_screen(report: Report) -> RenderableType:
    result = report.result
    budget = budget_said(result.budget_bytes, report.graph.device, result.reserved_bytes)
    head = Text.assemble(
        (report.graph.name, "bold"), f"{ops_text(report.graph)}, budget {budget}\n"
    )
    said = verdict(report.graph, report.rows[0].time_us, result, report.check)
    table = plain_table("predicted | measured", "peak", "step", "overhead")
    for row in report.rows:
        peak = bytes_pair(row.peak_bytes, row.measured_peak_bytes)
        step = time_pair(row.time_us, row.measured_step_us)
        is_base = row.name == "unmodified"  # of the unmodified step it is 0 by definition
        overhead = "-" if is_base else percent_pair(row.overhead, row.measured_overhead)
        table.add_row(_LABELS.get(row.name, row.name), peak, step, overhead)
    details = rows_table(_run_rows(report))
    return Group(head, table, Text(), details, _verdict_line(said, report))


def _verdict_line(said: str, report: Report | RangeReport) -> Text:
    return Text(f"\n{said}", "bold red" if report.failures else "bold green")


def ops_text(graph: TrainingGraph) -> str:
    backward = len(graph.ops) - graph.n_forward
    return f", {graph.n_forward} forward and {backward} backward ops"


def _run_rows(report: Report) -> _Said:
    result, graph = report.result, report.graph
    yield "lower bound", bound_text(graph, result)
    if report.simulation:
        yield "peak held by", _held(graph, result.schedule, report.simulation)
    yield from _reserved_rows(report.rows)
    for advice in filter(None, (*advice_on_run(report), report.shortage)):
        yield "advice", advice
    yield from _check_rows(report, result.budget_bytes)
    yield from _way_rows(report)
    if is_in_table(graph.device) or graph.notes:  # the figures are no measurement on this machine
        yield "costs", costs_text(graph)
    yield "took", took_text(report.seconds)
    yield "status", f"{result.status}, by {result.solver}"
    if result.message:
        yield "note", result.message


def _check_rows(report: Report | RangeReport, budget_bytes: int, at: str = "") -> _Said:
    if report.check:
        yield from _equal_rows(report.check, budget_bytes, at)
    if report.unchecked:
        yield "not run", report.unchecked


def _equal_rows(check: Check, budget_bytes: int, at: str = "") -> _Said:
    yield "equal", f"{equal_text(check)}{at}"
    for advice in advice_of(check, budget_bytes):
        yield "advice", advice


def _reserved_rows(rows: Iterable[Row]) -> _Said:
    known = {row.name: row for row in rows}
    plan, without = known.get("this plan"), known["unmodified"].reserved
    if plan is not None and plan.reserved is not None:  # a CPU's allocator reserves nothing
        yield "reserved", reserved_text(plan.reserved, without)
    measured = [(row.name, row.reserved_bytes) for row in known.values()]
    said = [f"{_LABELS.get(n, n)} {bytes_text(held)}" for n, held in measured if held is not None]
    if said:
        yield "", f"measured: {', '.join(said)}"


def _way_rows(report: Report) -> _Said:
    graph, result = report.graph, report.result
    if report.recipe and report.recipe.left_out:
        yield "left out", f"{', '.join(report.recipe.left_out)}, which training does not use"
    for one in chunks_of(graph, result.schedule):
        yield "in chunks", str(one)
    moved = offloaded(graph, result.schedule, report.simulation)
    yield from moved.rows() if moved is not None else ()
    if small := too_small_host(graph):
        yield "NVMe", small
    if kinds := kinds_text(report.kinds):
        yield "recomputed", kinds
    if result.attention:
        yield "attention", str(result.attention)
    if report.simpler:
        yield "simpler", str(report.simpler)
    if report.compiled:
        yield "compiled", report.compiled


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


def check_screen(check: Check, budget_bytes: int) -> RenderableType:
    table = plain_table("measured", "peak", "step", "overhead")
    for name, peak_bytes, step_us, overhead in (
        ("unmodified", check.baseline_peak_bytes, check.baseline_step_us, "-"),
        ("this plan", check.plan_peak_bytes, check.plan_step_us, percent_text(check.overhead)),
    ):
        table.add_row(name, bytes_text(peak_bytes), time_text(step_us), overhead)
    equal, *advice = _equal_rows(check, budget_bytes)
    held = check.plan_reserved_bytes
    reserved = [] if held is None else [("reserved", bytes_text(held))]
    return Group(table, Text(), rows_table((equal, *reserved, *advice)))


# What the command line prints with `--json`: plain bytes, microseconds and names.


def report_json(report: Report) -> dict[str, Any]:
    result, attention = report.result, report.result.attention
    rows: Any = {said.pop("name"): said for said in msgspec.to_builtins(report.rows)}
    said = {
        "status": result.status,
        "solver": result.solver,
        "budget_bytes": result.budget_bytes,
        "reserved_bytes": result.reserved_bytes,
        "model": report.graph.name,
        "ops": len(report.graph.ops),
        "device": report.graph.device,
        "prices": report.graph.cost_origin,  # keys keep the names of older releases
        "price_notes": report.graph.notes,
        "baseline": rows["unmodified"],
        "chen_sqrt": rows["chen_sqrt"],
        "plan": rows.get("this plan"),
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
        "compiled": report.compiled,
        "advice": advice_on_run(report),
        "failures": report.failures,
        "seconds": {name: round(value, 3) for name, value in report.seconds.items()},
    }
    if result.schedule is None:
        names = "name", "size_bytes", "module"
        said |= {
            "least_feasible_bytes": result.least_feasible_bytes,
            "held_at_peak": [{n: getattr(v, n) for n in names} for v in result.held_at_peak],
            "error": {"type": "Infeasible", "message": infeasible_text(result)},
        }
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


def range_screen(report: RangeReport) -> RenderableType:
    at = f" at {sizes_text(report.sizes)}" if report.sizes else ""
    rows = *_check_rows(report, report.family.budget_bytes, at), ("took", took_text(report.seconds))
    plan = Plan.from_family(report.family, report.graph)
    graph = report.graph.bounding(report.graph.symbols)
    facts = step_facts(graph, plan, report.check, is_range=True)
    shown = family_screen(report.family, report.curve), rows_table(rows)
    return Group(*shown, _verdict_line(facts.verdict, report))


def family_screen(family: Family, curve: Curve) -> RenderableType:
    ranges, budget = ", ".join(map(str, family.symbols)), bytes_text(family.budget_bytes)
    head = Text.assemble((family.model, "bold"), f" over {ranges}, budget {budget}\n")
    table = plain_table("sizes", "schedule", "peak", "step", "overhead")
    for point in curve.points:
        number = str(point.member + 1)  # people count from 1
        figures = bytes_text(point.peak_bytes), time_text(point.time_us)
        table.add_row(sizes_text(point.sizes), number, *figures, percent_text(point.overhead))
    most, bound = bytes_text(family.peak_bytes), percent_text(family.top.lower_overhead)
    off, top = percent_text(family.cost_error), sizes_text(family.top.sizes)
    rows = (
        ("certificate", f"no size needs more than {most}, by the {family.certificate}"),
        ("lower bound", f"{bound} overhead at this budget at {top}"),
        ("costs", f"of three sizes, fitted between; {off} off at the middle"),
    )
    return Group(head, table, Text(), rows_table(rows))


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
