"""The verbs that run the model: `run` and `check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.cli import options
from remat.cli.asked import asked, conclude, keep_plan, priced, said_price, show_price
from remat.cli.session import CHECK_FAILED, INFEASIBLE, Session
from remat.graph_capture.derived.sharding import Sharding
from remat.graph_capture.devices.device_table import CPU
from remat.infeasible import infeasible_text
from remat.job import json_report, pipeline
from remat.job.factory import Loaded
from remat.job.kept_plans import fitting_schedule, plan_of_result, read_kept
from remat.job.opened import load_shown
from remat.job.screen import show_check, show_run
from remat.schedules.schedule import Schedule
from remat.solver.budgets.price import GibPrice

if TYPE_CHECKING:
    pass


def run(
    model: options.Model,
    budget: options.Budget = "auto",
    solver: options.Solver = "auto",
    order: options.Order = options.OrderName.fixed,
    time_limit: options.TimeLimit = 60.0,
    keep: options.Keep = [],  # noqa: B006 typer copies it
    recompute: options.Recompute = [],  # noqa: B006
    price: options.PriceOfGib = False,
    optimizer: options.Optimizer = options.OptimizerName.none,
    accumulate: options.Accumulate = False,
    device: options.Device = CPU,
    shard: options.Shard = options.ShardName.none,
    world_size: options.WorldSize = 1,
    shard_blocks: options.ShardBlocks = "",
    profile: options.ProfileFile = None,
    check: options.Check = False,
    output: options.Output = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Capture, price, solve, rewrite and check: the whole job, on one screen."""
    session = Session(as_json=as_json, debug=debug)
    with session.guarded():
        session.require_folder(output)
        request = asked(
            budget, solver, order, time_limit, optimizer, accumulate, keep, recompute, device,
            profile, Sharding(shard.value, world_size, shard_blocks), check,
        )  # fmt: skip
        loaded = load_shown(model, session.stages, device)
        report = pipeline.run(loaded, request, session.stages)
        _keep(session, output, loaded, report)
        worth = priced(session, report.graph, report.result, request) if price else None
        if as_json:
            session.emit(json_report.report_json(report) | said_price(worth))
        _conclude_run(session, report, worth)


def _keep(session: Session, path: Path | None, loaded: Loaded, report: pipeline.Report) -> None:
    if path is not None and report.recipe is not None:
        keep_plan(session, path, plan_of_result(loaded, report.recipe, report.graph, report.result))


def _conclude_run(session: Session, report: pipeline.Report, price: GibPrice | None) -> None:
    """Print the screen, unless JSON was, and end with the code that fits."""
    if report.result.schedule is None:
        conclude(session, INFEASIBLE, [infeasible_text(report.result)])
    if not session.as_json:
        show_run(session.out, report)
        show_price(session, price)
    conclude(session, CHECK_FAILED, report.failures)


def check(
    model: options.Model,
    plan: options.Plan,
    optimizer: options.Optimizer = options.OptimizerName.none,
    accumulate: options.Accumulate = False,
    device: options.Here = CPU,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Rewrite MODEL to a kept plan and compare it with eager, bit for bit."""
    session = Session(as_json=as_json, debug=debug)
    with session.guarded():
        kept = read_kept(plan)
        loaded = load_shown(model, session.stages, device)
        schedule = fitting_schedule(kept, loaded)
        with session.stages.stage("capture", "tracing the training step"):
            traced = pipeline.trace_loaded(loaded, optimizer.value, accumulate, device)
            schedule.check_made_for(traced.graph)
        with session.stages.stage("check", "checking the plan against eager"):
            found = pipeline.check_schedule(loaded, traced, schedule, optimizer.value, accumulate)
        failures = pipeline.failures(found, schedule.budget_bytes)
        if as_json:
            session.emit(_check_json(found, schedule, failures))
        else:
            show_check(session.out, found, schedule.budget_bytes)
        conclude(session, CHECK_FAILED, failures)


def _check_json(found: Any, schedule: Schedule, failures: list[str]) -> dict[str, Any]:
    return {
        "budget_bytes": schedule.budget_bytes,
        "check": json_report.check_json(found, schedule.budget_bytes),
        "baseline": {
            "measured_peak_bytes": found.baseline_peak_bytes,
            "reserved_bytes": found.baseline_reserved_bytes,
            "measured_step_us": found.baseline_step_us,
        },
        "plan": {
            "measured_peak_bytes": found.plan_peak_bytes,
            "reserved_bytes": found.plan_reserved_bytes,
            "measured_step_us": found.plan_step_us,
            "measured_overhead": found.overhead,
        },
        "failures": failures,
    }
