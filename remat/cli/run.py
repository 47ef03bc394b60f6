"""The verbs that run the model: `run` and `check`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from remat.analysis.budget_sweep import price_json, price_text
from remat.checks import failures
from remat.cli.session import (
    CHECK_FAILED,
    INFEASIBLE,
    Session,
    layout_entry,
    save_layout_file,
    save_plan_file,
    save_result_file,
    show_layout,
)
from remat.cli.verb import (
    STEP_OPTIONS,
    DynamicOption,
    LayoutFile,
    Model,
    Output,
    PlanArgument,
    RunIt,
    Source,
    more,
    verb,
)
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

_PriceOfGib = Annotated[bool, more("--price-of-gib", "also say what a GiB more or less is worth")]
_CompareRule = Annotated[
    bool, more("--compare", "also run square-root checkpointing, and measure it")
]
_ONE_BATCH = (  # a whole step takes none: it is limited by plans, not seconds
    "keep", "recompute", "solver", "order", "split", "sharding", "optimizer_in_backward",
    "accumulate", "time_limit_s", "gap",
)  # fmt: skip
_Microbatches = Annotated[int | None, more(
    "--microbatches",
    "plan a whole optimizer step of so many such batches, with parameters, gradients and the "
    "state of --optimizer on the device, --host and --nvme; nothing is run",
)]  # fmt: skip
_State = Annotated[Literal["float32", "parameter"], more(
    "--optimizer-state",
    "with --microbatches: float32, with a master copy of parameters in fewer bytes, or in the "
    "parameter's own type, as torch's optimizers keep it",
)]  # fmt: skip
_NvmeRate = Annotated[float | None, more(
    "--nvme-gb-s",
    "with --microbatches: rate of --nvme each way in 10^9 bytes a second; left out, that of "
    "the drive in the table",
)]  # fmt: skip


@verb(budget="auto")
def run_verb(
    session: Session, source: Source, request: Request, price: _PriceOfGib = False,
    check: RunIt = None, compare: _CompareRule = False, output: Output = None,
    layout: LayoutFile = None, dynamic: DynamicOption = [],  # noqa: B006 typer copies it
    microbatches: _Microbatches = None, state: _State = "float32", nvme_gb_s: _NvmeRate = None,
) -> None:  # fmt: skip
    """Find the fastest training step within a memory budget, run it, and compare it with yours.

    A kept GRAPH, or that of a PLAN, is solved anew, and nothing is run.
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
        worth = _priced(session, report, request) if price else None
        _conclude_run(session, report, placed, worth)


def _run(
    session: Session, model: str, request: Request, output: Path | None, check: bool | None,
    compare: bool,
) -> pipeline.Report:  # fmt: skip
    loaded, request = plan_source.load_shown(model, session.stopwatch, request)

    def keep(known: pipeline.Report) -> None:  # written before a step, which may end the process
        of = plan_source.Captured(known.graph, loaded, known.recipe)
        save_result_file(session, output, of, known.result, request.order)

    report = pipeline.run_job(
        loaded, request, session.stopwatch, check=check, compare=compare, planned=keep
    )
    of = plan_source.Captured(report.graph, loaded, report.recipe)
    found = report.check, report.unchecked  # kept too, so the file is written once more
    if output is not None and any(found):
        plan = plan_source.plan_of_result(of, report.result, request.order, *found)
        assert plan is not None
        plan_source.write_plan(plan, output)
    return report


def _solved_anew(
    session: Session, source: str, request: Request, output: Path | None,
    measured: dict[str, bool],
) -> pipeline.Report:  # fmt: skip
    """The graph of a kept file, solved; refuses options that run a step, which takes the model."""
    if flag := next((flag for flag, is_given in measured.items() if is_given), ""):
        raise CaptureError(f"{source} has no model to run: {flag} goes with a model")
    of = plan_source.captured(source, request, session.stopwatch)
    report, _ = pipeline.planned_report(of.graph, request, session.stopwatch)
    save_result_file(session, output, of, report.result, request.order)
    return report


def _priced(session: Session, report: pipeline.Report, request: Request) -> GibPrice | None:
    if report.result.schedule is None or is_interrupted():
        return None
    with session.stopwatch.stage("price", "pricing a GiB"):
        return price_of_gib(
            report.graph, report.result, solver=request.solver,
            time_limit_s=request.time_limit_s, **request.solving,
        )  # fmt: skip


def _conclude_run(
    session: Session, report: pipeline.Report, layout: Layout | None, price: GibPrice | None
) -> None:
    if session.as_json:
        worth: dict[str, Any] = {} if price is None else {"price_of_gib": price_json(price)}
        session.emit(screen.report_json(report) | layout_entry(layout) | worth)
    if report.result.schedule is None:  # only after the object of --json: this ends the process
        session.conclude(INFEASIBLE, [infeasible_text(report.result)])
    if not session.as_json:
        screen.show_run(session.out, report)
        show_layout(session, layout)
        if price is not None:
            session.out.print(f"price  {price_text(price)}")
    session.conclude(CHECK_FAILED, report.failures)


def _run_over(
    session: Session, model: str, request: Request, dynamic: Sequence[str], output: Path | None,
    check: bool | None,
) -> None:  # fmt: skip
    ranges = parse_dynamic(dynamic)
    if model.endswith(plan_source.PLAN_FILES):
        raise CaptureError(f"{model} is of sizes that are fixed: --dynamic goes with a model")
    loaded, request = plan_source.load_shown(model, session.stopwatch, request)

    kept = list[tuple[Path, PlanFile]]()

    def keep(plan: PlanFile) -> None:
        if output is not None:
            save_plan_file(session, output, plan)
            kept.append((output, plan))

    try:
        report = pipeline.plan_over(loaded, request, ranges, session.stopwatch, keep, check=check)
    except TooLargeError as error:
        session.fail(INFEASIBLE, type(error).__name__, str(error))  # too little memory ends with 3
        raise
    report = replace(report, seconds=session.stopwatch.accounted())
    for path, plan in kept:
        found = report.check and report.check.as_kept()
        whole = msgspec.structs.replace(plan, check=found, unchecked=report.unchecked)
        plan_source.write_plan(whole, path)
    if session.as_json:
        session.emit(screen.range_report_json(report))
    else:
        screen.show_range_report(session.out, report)
    session.conclude(CHECK_FAILED, report.failures)


def _run_whole_step(
    session: Session, model: str, request: Request, microbatches: int, **state: Any
) -> None:
    from remat.whole_step.step_planning import StepRequest, plan_step  # a wing, which others omit
    from remat.whole_step.step_screen import show_step, step_json

    asked = StepRequest(
        request.device or CPU, microbatches, request.optimizer, request.budget,
        request.host or None, request.nvme or None, **state,
    )  # fmt: skip
    loaded, request = plan_source.load_shown(model, session.stopwatch, request)
    with session.stopwatch.stage("plan", "planning the whole step") as shown:
        plan = plan_step(
            loaded.model, loaded.args, loaded.kwargs, asked, loss_fn=loaded.loss_fn,
            target=loaded.target, profile=request.read_profile(),
            told=lambda text: shown(text=text),
        )  # fmt: skip
    if session.as_json:
        session.emit(step_json(plan))
    if plan.shortage:
        session.conclude(INFEASIBLE, [plan.shortage])
    if not session.as_json:
        show_step(session.out, plan)


def _refuse_beside_microbatches(is_left_out: bool, kept: Path | str | bool | None,
                                request: Request) -> None:  # fmt: skip
    if is_left_out:
        raise SolverError(
            "--nvme-gb-s and --optimizer-state are of a whole step: give --microbatches too"
        )
    if kept:
        raise SolverError(
            f"{kept} goes with a plan that runs, and one of --microbatches is planned and not run: "
            "leave it out, --json prints what was found"
        )
    usual = Request()  # typer gives every option: another value was asked for
    for name in _ONE_BATCH:
        if getattr(request, name) != getattr(usual, name):
            raise SolverError(
                f"{option(name)} is of the step of one batch: leave it out, or --microbatches"
            )


@verb(STEP_OPTIONS)
def check_verb(session: Session, model: Model, plan: PlanArgument, request: Request) -> None:
    """Rewrite MODEL to a kept plan and compare it with eager, bit for bit."""
    plan_source.require_model(model)
    kept = plan_source.read_kept(plan)  # read first: a bad file is told before the model is built
    loaded, request = plan_source.load_shown(model, session.stopwatch, request)
    if isinstance(kept, PlanFile) and kept.over is not None:
        from remat.rewriter.plans.loading import load_plan

        with session.stopwatch.stage("check", "checking the plan against eager"):
            module = load_plan(kept, loaded.model, loss_fn=loaded.loss_fn)
            found = pipeline.compare_with_eager(loaded, module, request)
        _conclude_check(session, found, kept.over.family.budget_bytes)
        return
    schedule = plan_source.fitting_schedule(kept, loaded, str(plan))
    with session.stopwatch.stage("capture", "tracing the training step"):
        traced = pipeline.trace_loaded(loaded, request)
        schedule.check_captured_as(traced.graph)  # first: it names the op that differs
    with session.stopwatch.stage("check", "checking the plan against eager"):
        costed = plan_source.costed_graph_in(kept)
        found = pipeline.check_schedule(loaded, traced, schedule, request, costed)
    _conclude_check(session, found, schedule.budget_bytes)


def _conclude_check(session: Session, found: Check, budget_bytes: int) -> None:
    failed = failures(found, budget_bytes)
    if session.as_json:
        session.emit(screen.checked_json(found, budget_bytes, failed))
    else:
        screen.show_check(session.out, found, budget_bytes)
    session.conclude(CHECK_FAILED, failed)
