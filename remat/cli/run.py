"""The verbs that run the model: `run` and `check`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.budgets import parse_budget
from remat.cli import options
from remat.cli.session import CHECK_FAILED, INFEASIBLE, Session
from remat.graph_capture.derived.sharding import NO_SHARDING, Sharding
from remat.graph_capture.devices.device_table import CPU, check_device
from remat.graph_capture.graph import TrainingGraph
from remat.job import json_report, pipeline
from remat.job.factory import Loaded
from remat.job.kept_plans import fitting_schedule, plan_of_result, read_kept, write_plan
from remat.job.opened import NO_BUDGET, Captured, Opened, load_shown, open_plan
from remat.job.screen import show_check, show_run
from remat.one_call import infeasible_text
from remat.questions.sweep import price_json, price_text
from remat.schedules.plan import Plan
from remat.schedules.schedule import Schedule
from remat.solver import make_solver
from remat.solver.budgets.front import Price
from remat.solver.budgets.worth import price_of_gib
from remat.solver.result import Result

if TYPE_CHECKING:
    from remat.graph_capture.prices.profile import Profile


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


def keep_plan(session: Session, path: Path, plan: Plan | None) -> None:
    """Write a plan and say so; nothing where nothing fits."""
    if plan is not None:
        write_plan(plan, path)
        session.err.print(f"plan written to {path}", markup=False, soft_wrap=True)


def keep_result(session: Session, path: Path | None, of: Captured, result: Result) -> None:
    """A plan where a model is at hand, else the schedule alone; nothing where nothing fits."""
    if path is None or result.schedule is None:
        return
    if of.loaded is not None and of.recipe is not None:
        keep_plan(session, path, plan_of_result(of.loaded, of.recipe, of.graph, result))
    else:
        session.save(path, result.schedule.to_json(), "plan")


def _conclude_run(session: Session, report: pipeline.Report, price: Price | None) -> None:
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


def opened_feasible(
    session: Session, source: str, request: pipeline.Request, plan: Path | None
) -> Opened:
    """A graph and the plan of it, if one is named or asked for; ends where nothing fits."""
    opened = open_plan(source, request, session.stages, plan)
    if opened.result is not None and opened.schedule is None:
        conclude(session, INFEASIBLE, [infeasible_text(opened.result)])
    return opened


def conclude(session: Session, code: int, complaints: list[str]) -> None:
    """Say each complaint and end with `code`; do nothing where there is none."""
    for complaint in complaints:
        session.complain(complaint)
    if complaints:
        raise SystemExit(code)


def asked(
    budget: str,
    solver: str,
    order: options.OrderName,
    time_limit_s: float,
    optimizer: options.OptimizerName,
    accumulate: bool,
    keep: Sequence[str] = (),
    recompute: Sequence[str] = (),
    device: str = CPU,
    profile: Path | None = None,
    sharding: Sharding = NO_SHARDING,
    check: bool = False,
) -> pipeline.Request:
    """The request, refused before anything runs if a part of it is unknown.

    `NO_BUDGET` stands for none.
    """
    if budget != NO_BUDGET:
        parse_budget(budget)
    check_device(device)
    known = read_profile(profile)
    make_solver(solver, order=order.value)
    return pipeline.Request(
        budget, solver, time_limit_s, optimizer.value, accumulate, tuple(keep), tuple(recompute),
        order.value, device, known, sharding, check,
    )  # fmt: skip


def read_profile(path: Path | None) -> Profile | None:
    """The profile kept in that file, if one is given."""
    if path is None:
        return None
    from remat.graph_capture.prices.profile import as_profile

    return as_profile(path)


def priced(
    session: Session, graph: TrainingGraph, result: Result, request: pipeline.Request
) -> Price | None:
    """What a GiB is worth at that result, None where nothing fits."""
    if result.schedule is None:
        return None
    with session.stages.stage("price", "pricing a GiB"):
        return price_of_gib(
            graph, result, solver=request.solver, time_limit_s=request.time_limit_s,
            keep=request.keep, recompute=request.recompute, order=request.order,
        )  # fmt: skip


def said_price(price: Price | None) -> dict[str, Any]:
    """The price as an entry of the JSON object, if there is one."""
    return {} if price is None else {"price_of_gib": price_json(price)}


def show_price(session: Session, price: Price | None) -> None:
    """One line with the price, if there is one."""
    if price is not None:
        session.out.print(f"price  {price_text(price)}")
