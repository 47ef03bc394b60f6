"""What the command line prints with `--json`: plain bytes, microseconds and names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from remat.checks import CHECKED, advice_of
from remat.graph_capture.graph import TrainingGraph
from remat.infeasible import infeasible_text
from remat.job.advice import advice_on_run
from remat.job.pipeline import Report, RunsAgain
from remat.job.rows import Row
from remat.levers.offloaded import offloaded
from remat.questions.pieces import pieces_of
from remat.questions.reserved import reserved_beside
from remat.schedules.simulate import bound_of
from remat.solver.result import Result

if TYPE_CHECKING:
    from remat.rewriter.checking.check import Check


def report_json(report: Report) -> dict[str, Any]:
    """The object that ``remat run --json`` prints."""
    result, rows = report.result, {row.name: row for row in report.rows}
    said = {
        "status": result.status,
        "solver": result.solver,
        "budget_bytes": result.budget_bytes,
        "model": report.graph.name,
        "ops": len(report.graph.ops),
        "device": report.graph.device,
        "prices": report.graph.prices,
        "price_notes": report.graph.notes,
        "baseline": _row_json(rows["unmodified"]),
        "chen_sqrt": _row_json(rows["chen_sqrt"]),
        "plan": _row_json(rows["this plan"]) if "this plan" in rows else None,
        "bound": bound_json(report.graph, result),
        "message": result.message,
        "pieces": msgspec.to_builtins(pieces_of(report.graph, result.schedule)),
        "offload": msgspec.to_builtins(offloaded(report.graph, result.schedule)),
        **again_json(result, report.again),
        "check": check_json(report.check, result.budget_bytes) if report.check else None,
        "unchecked": report.unchecked,
        "shortage": report.shortage,
        "advice": advice_on_run(report),
        "failures": report.failures,
        "seconds": {name: round(value, 3) for name, value in report.seconds.items()},
    }
    if result.schedule is None:
        said |= infeasible_json(result)
    return said


def result_json(graph: TrainingGraph, result: Result, again: RunsAgain) -> dict[str, Any]:
    """The object that ``remat solve --json`` prints."""
    said: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(result, least_schedule=None))
    said |= {"bound": bound_json(graph, result)} | again_json(result, again)
    said |= {"offload": msgspec.to_builtins(offloaded(graph, result.schedule))}
    said |= {"predicted_reserved": msgspec.to_builtins(reserved_beside(graph, result))}
    return said if result.schedule else said | infeasible_json(result)


def bound_json(graph: TrainingGraph, result: Result) -> dict[str, float | None]:
    """The proven bound: in microseconds, as an overhead, and how far the plan is from it.

    None stands for what is not proved.
    """
    overhead = bound_of(result.lower_bound_us, graph.time_us)
    bound_us = None if overhead is None else result.lower_bound_us
    return {"lower_bound_us": bound_us, "overhead": overhead, "gap": result.gap}


def again_json(result: Result, again: RunsAgain) -> dict[str, Any]:
    """What runs again, by kind of op and in attention; the floor; a simpler way if there is one."""
    attention = result.attention
    return {
        "recomputed": [kind._asdict() for kind in again.kinds if kind.recomputed],
        "attention": attention and {**msgspec.to_builtins(attention), "says": str(attention)},
        "floor": msgspec.to_builtins(result.floor),
        "every_n_layers": msgspec.to_builtins(again.simpler),
    }


def check_json(check: Check, budget_bytes: int) -> dict[str, Any]:
    """What was equal, and how many gradients were."""
    equal = {f"{name}_equal": bool(getattr(check, f"{name}_equal")) for name in CHECKED}
    return {
        **equal,
        "gradients": check.gradients,
        "gradients_total": check.gradients_total,
        "unsteady": check.unsteady,
        "advice": advice_of(check, budget_bytes),
    }


def checked_json(check: Check, budget_bytes: int, failures: list[str]) -> dict[str, Any]:
    """The object that ``remat check --json`` prints."""
    return {
        "budget_bytes": budget_bytes,
        "check": check_json(check, budget_bytes),
        "baseline": {
            "measured_peak_bytes": check.baseline_peak_bytes,
            "reserved_bytes": check.baseline_reserved_bytes,
            "measured_step_us": check.baseline_step_us,
        },
        "plan": {
            "measured_peak_bytes": check.plan_peak_bytes,
            "reserved_bytes": check.plan_reserved_bytes,
            "measured_step_us": check.plan_step_us,
            "measured_overhead": check.overhead,
        },
        "failures": failures,
    }


def infeasible_json(result: Result) -> dict[str, Any]:
    """What there is to say where nothing fits."""
    held = [
        {"name": item.name, "size_bytes": item.size_bytes, "module": item.module}
        for item in result.held_at_peak
    ]
    return {
        "least_feasible_bytes": result.least_feasible_bytes,
        "held_at_peak": held,
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
