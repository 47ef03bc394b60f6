"""The verbs that run the model: `run` and `check`."""

from __future__ import annotations

from typing import Any

from remat import cli_options as options
from remat import pipeline
from remat.api import infeasible_text
from remat.budget import parse_budget
from remat.cli_session import CHECK_FAILED, INFEASIBLE, Session
from remat.factory import Loaded, load
from remat.schedules.schedule import Schedule
from remat.screen import show_check, show_run
from remat.solver import solver_class


def run(
    model: options.Model,
    budget: options.Budget = "auto",
    solver: options.Solver = "auto",
    time_limit: options.TimeLimit = 60.0,
    optimizer: options.Optimizer = options.OptimizerName.none,
    accumulate: options.Accumulate = False,
    output: options.Output = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Capture, price, solve, rewrite and check: the whole job, on one screen."""
    session = Session(as_json=as_json, debug=debug)
    with session.guarded():
        request = asked(budget, solver, time_limit, optimizer, accumulate)
        report = pipeline.run(load_shown(model, session), request, session.stages)
        if report.result.schedule:
            session.save(output, report.result.schedule.to_json(), "plan")
        if as_json:
            session.emit(pipeline.report_json(report))
        _conclude_run(session, report)


def _conclude_run(session: Session, report: pipeline.Report) -> None:
    """Print the screen, unless JSON was, and end with the code that fits."""
    if report.result.schedule is None:
        conclude(session, INFEASIBLE, [infeasible_text(report.result)])
    if not session.as_json:
        show_run(session.out, report)
    conclude(session, CHECK_FAILED, report.failures)


def check(
    model: options.Model,
    plan: options.Plan,
    optimizer: options.Optimizer = options.OptimizerName.none,
    accumulate: options.Accumulate = False,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Rewrite MODEL to a kept plan and compare it with eager, bit for bit."""
    session = Session(as_json=as_json, debug=debug)
    with session.guarded():
        schedule = Schedule.from_json(plan.read_bytes())
        loaded = load_shown(model, session)
        with session.stages.stage("capture", "tracing the training step"):
            traced = pipeline.trace_loaded(loaded, optimizer.value, accumulate)
            schedule.check_made_for(traced.graph)
        with session.stages.stage("check", "checking the plan against eager"):
            found = pipeline.check_schedule(loaded, traced, schedule, optimizer.value, accumulate)
        failures = pipeline.failures(found, schedule.budget_bytes)
        if as_json:
            session.emit(_check_json(found, schedule, failures))
        else:
            show_check(session.out, found)
        conclude(session, CHECK_FAILED, failures)


def _check_json(found: Any, schedule: Schedule, failures: list[str]) -> dict[str, Any]:
    return {
        "budget_bytes": schedule.budget_bytes,
        "check": pipeline.check_json(found),
        "baseline": {
            "measured_peak_bytes": found.baseline_peak_bytes,
            "measured_step_us": found.baseline_step_us,
        },
        "plan": {
            "measured_peak_bytes": found.plan_peak_bytes,
            "measured_step_us": found.plan_step_us,
            "measured_overhead": found.overhead,
        },
        "failures": failures,
    }


def conclude(session: Session, code: int, complaints: list[str]) -> None:
    """Say each complaint and end with `code`; do nothing where there is none."""
    for complaint in complaints:
        session.complain(complaint)
    if complaints:
        raise SystemExit(code)


def load_shown(model: str, session: Session) -> Loaded:
    """Load the model, showing that it takes its time."""
    with session.stages.stage("load", f"loading {model}"):
        return load(model)


def asked(
    budget: str,
    solver: str,
    time_limit_s: float,
    optimizer: options.OptimizerName,
    accumulate: bool,
) -> pipeline.Request:
    """The request, refused before anything runs if its budget or solver is unknown."""
    parse_budget(budget)
    solver_class(solver)
    return pipeline.Request(budget, solver, time_limit_s, optimizer.value, accumulate)
