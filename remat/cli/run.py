"""The verbs that run the model: `run` and `check`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from remat.analysis.budget_sweep import price_json, price_text
from remat.checks import failures
from remat.cli.session import (
    CHECK_FAILED,
    INFEASIBLE,
    Session,
    save_layout_file,
    save_plan_file,
    save_result_file,
)
from remat.cli.verb import STEP_OPTIONS, verb
from remat.formats import rows_table
from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.errors import CaptureError, SolverError, TooLargeError, option
from remat.job import pipeline, plan_source, screen
from remat.job.pipeline import refuse_beside_dynamic
from remat.job.request import Request, parse_dynamic
from remat.schedules.layout import Layout
from remat.schedules.outcome import Check
from remat.schedules.plan import PlanFile
from remat.solved import infeasible_text
from remat.solver.budgets.front import GibPrice
from remat.solver.budgets.sweep import price_of_gib
from remat.solver.search import is_interrupted

_ONE_BATCH = (  # a whole step takes none: it is limited by plans, not seconds
    "keep", "recompute", "solver", "order", "outputs",
    "optimizer_in_backward", "accumulate", "time_limit_s", "gap",
)  # fmt: skip


@verb(budget="auto")
def run_verb(
    session: Session, source: str, request: Request, price: bool = False,
    check: bool | None = None, compare: bool = False, output: Path | None = None,
    layout: Path | None = None, dynamic: list[str] = [],  # noqa: B006 typer copies it
    microbatches: int | None = None, state: Literal["float32", "parameter"] = "float32",
    nvme_gb_s: float | None = None,
) -> None:  # fmt: skip
    """Find the fastest training step within a memory budget, run it, and compare it with yours.

    A kept GRAPH or PLAN is solved again, without running it.
    """
    # What each way to plan takes only beside a model, and what not beside --dynamic either.
    measured = {"--check": check is not None, "--compare": compare}
    of_one_size = {"--price-of-gib": price, "--compare": compare, "--layout": layout is not None}
    # Options of a whole step lead there too, where they are refused without --microbatches.
    if microbatches is not None or nvme_gb_s is not None or state != "float32":
        given = {**of_one_size, **measured, "--dynamic": bool(dynamic)}
        flags = next((flag for flag, is_given in given.items() if is_given), "")
        _refuse_beside_microbatches(microbatches is None, output or layout or flags, request)
        _run_whole_step(
            session, source, request, microbatches or 0, state=state, nvme_gb_s=nvme_gb_s
        )
    elif dynamic:
        refuse_beside_dynamic(request, **of_one_size)
        _run_over(session, source, request, dynamic, output, check)
    else:
        if source.endswith(plan_source.PLAN_FILES):
            report = _solved_anew(session, source, request, output, measured)
        else:
            report = _run(session, source, request, output, check, compare)
        report = replace(report, seconds=session.stopwatch.accounted())
        placed = save_layout_file(session, layout, report.graph, report.result)
        worth = None
        if price and report.result.schedule is not None and not is_interrupted():
            with session.stopwatch.stage("price", "pricing a GiB"):
                worth = price_of_gib(
                    report.graph, report.result, solver=request.solver,
                    time_limit_s=request.time_limit_s, **request.solving,
                )  # fmt: skip
        _conclude_run(session, report, placed, worth)


def _run(
    session: Session, model: str, request: Request, output: Path | None, check: bool | None,
    compare: bool,
) -> pipeline.Report:  # fmt: skip
    loaded, request = plan_source.load_shown(model, session.stopwatch, request)

    kept = list[PlanFile | None]()

    def keep(known: pipeline.Report) -> None:  # written before a step, which may end the process
        of = plan_source.Captured(known.graph, loaded, known.recipe)
        kept.append(save_result_file(session, output, of, known.result, request.order))

    report = pipeline.run_job(
        loaded, request, session.stopwatch, check=check, compare=compare, planned=keep
    )
    _keep_check(output, kept, report)
    return report


def _keep_check(
    path: Path | None, kept: Sequence[PlanFile | None],
    report: pipeline.Report | pipeline.RangeReport,
) -> None:  # fmt: skip
    """Write plans once more, with what a step showed; not to a pipe, which would have both."""
    if path is None or not path.is_file() or not (report.check or report.unchecked):
        return
    from remat.rewriter.plans.loading import save_plan

    found = report.check and report.check.as_kept()
    for plan in filter(None, kept):
        whole = msgspec.structs.replace(plan, check=found, unchecked=report.unchecked)
        save_plan(whole, path)


def _solved_anew(
    session: Session, source: str, request: Request, output: Path | None,
    measured: dict[str, bool],
) -> pipeline.Report:  # fmt: skip
    """The graph of a kept file, solved; refuses options that run a step, which takes the model."""
    if flag := next((flag for flag, is_given in measured.items() if is_given), ""):
        raise CaptureError(f"leave out {flag}, or name a model: {source} has none to run")
    of = plan_source.captured(source, request, session.stopwatch)
    report, _ = pipeline.planned_report(of.graph, request, session.stopwatch)
    save_result_file(session, output, of, report.result, request.order)
    return report


def _conclude_run(
    session: Session, report: pipeline.Report, layout: Layout | None, price: GibPrice | None
) -> None:
    fits = report.result.schedule is not None
    worth: dict[str, Any] = {} if price is None else {"price_of_gib": price_json(price)}
    shown = [screen.run_screen(report)] if fits else []
    shown += [] if price is None else [rows_table([("price", price_text(price))])]
    session.answer(screen.report_json(report) | worth, *shown, layout=layout)
    if not fits:
        session.conclude(INFEASIBLE, [infeasible_text(report.result)])
    session.conclude(CHECK_FAILED, report.failures)


def _run_over(
    session: Session, model: str, request: Request, dynamic: Sequence[str], output: Path | None,
    check: bool | None,
) -> None:  # fmt: skip
    ranges = parse_dynamic(dynamic)
    if model.endswith(plan_source.PLAN_FILES):
        raise CaptureError(f"leave out --dynamic, or name a model: {model} has fixed sizes")
    loaded, request = plan_source.load_shown(model, session.stopwatch, request)

    kept = list[PlanFile]()

    def keep(plan: PlanFile) -> None:
        if output is not None:
            save_plan_file(session, output, plan)
            kept.append(plan)

    try:
        report = pipeline.plan_over(loaded, request, ranges, session.stopwatch, keep, check=check)
    except TooLargeError as error:
        session.fail(INFEASIBLE, type(error).__name__, str(error))  # too little memory ends with 3
        raise
    report = replace(report, seconds=session.stopwatch.accounted())
    _keep_check(output, kept, report)
    session.answer(screen.range_report_json(report), screen.range_screen(report))
    session.conclude(CHECK_FAILED, report.failures)


def _run_whole_step(
    session: Session, model: str, request: Request, microbatches: int, **state: Any
) -> None:
    from remat.whole_step.step_planning import StepRequest, plan_step  # a wing, which others omit
    from remat.whole_step.step_screen import step_json, step_screen

    asked = StepRequest(
        request.device or CPU, microbatches, request.optimizer, request.budget,
        request.host or None, request.nvme or None, sharding=request.sharding, **state,
    )  # fmt: skip
    loaded, request = plan_source.load_shown(model, session.stopwatch, request)
    with session.stopwatch.stage("plan", "planning the whole step") as shown:
        plan = plan_step(
            loaded.model, loaded.args, loaded.kwargs, asked, loss_fn=loaded.loss_fn,
            target=loaded.target, profile=request.read_profile(), split=request.split,
            told=lambda text: shown(text=text),
        )  # fmt: skip
    session.answer(step_json(plan), *(() if plan.shortage else (step_screen(plan),)))
    session.conclude(INFEASIBLE, [plan.shortage] if plan.shortage else [])


def _refuse_beside_microbatches(is_left_out: bool, kept: Path | str | bool | None,
                                request: Request) -> None:  # fmt: skip
    if is_left_out:
        raise SolverError(
            "give --microbatches too: --nvme-gb-s and --optimizer-state belong to a whole step"
        )
    if kept:
        raise SolverError(
            f"leave out {kept}: a plan of --microbatches is not run, and --json prints it"
        )
    usual = Request()  # typer gives every option: another value was asked for
    for name in _ONE_BATCH:
        if getattr(request, name) != getattr(usual, name):
            raise SolverError(
                f"leave out {option(name)}, or --microbatches: it belongs to a step of one batch"
            )


@verb(STEP_OPTIONS)
def check_verb(session: Session, model: str, plan: Path, request: Request) -> None:
    """Check that MODEL, rewritten to a kept plan, gives eager's results bit for bit."""
    plan_source.require_model(model)
    kept = plan_source.read_kept(plan)  # read first: a bad file is told before the model is built
    loaded, request = plan_source.load_shown(model, session.stopwatch, request, kept)
    if isinstance(kept, PlanFile) and kept.over is not None:
        from remat.rewriter.plans.loading import load_plan

        with session.stopwatch.stage("check", "checking the plan against eager"):
            module = load_plan(kept, loaded.model, loss_fn=loaded.loss_fn)
            found = pipeline.compare_with_eager(loaded, module, request)
        _conclude_check(session, found, kept.over.family.budget_bytes)
        return
    schedule, costed = plan_source.fitting_schedule(kept, loaded, str(plan))
    with session.stopwatch.stage("capture", "tracing the training step"):
        traced = pipeline.trace_loaded(loaded, request)
        schedule.check_captured_as(traced.graph)  # first: it names the op that differs
    with session.stopwatch.stage("check", "checking the plan against eager"):
        found = pipeline.check_schedule(loaded, traced, schedule, request, costed)
    _conclude_check(session, found, schedule.budget_bytes)


def _conclude_check(session: Session, found: Check, budget_bytes: int) -> None:
    failed = failures(found, budget_bytes)
    said = screen.checked_json(found, budget_bytes, failed)
    session.answer(said, screen.check_screen(found, budget_bytes))
    session.conclude(CHECK_FAILED, failed)
