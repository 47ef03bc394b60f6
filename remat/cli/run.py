"""The verbs that run the model: `run` and `check`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.text import Text

from remat.analysis.plan_report import plain_table
from remat.checks import failures
from remat.cli import shared_options
from remat.cli.output import (
    conclude_over,
    layout_entry,
    price_entry,
    priced,
    save_layout_file,
    save_plan_file,
    save_result_file,
    show_layout,
    show_price,
)
from remat.cli.session import CHECK_FAILED, INFEASIBLE, Session
from remat.cli.verb import CAPTURED, COUNTED, FIELDS, verb
from remat.formats import bytes_text, time_text
from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.job import pipeline
from remat.job import screen as json_report
from remat.job.factory import Loaded
from remat.job.pipeline import refuse_beside_dynamic
from remat.job.plan_source import (
    captured,
    captured_model,
    costed_graph_in,
    fitting_schedule,
    load_shown,
    plan_of_result,
    read_kept,
)
from remat.job.request import Request
from remat.job.screen import show_check, show_result, show_run
from remat.schedules.layout import Layout
from remat.schedules.plan import Plan
from remat.solved import infeasible_text
from remat.solver.budgets.front import GibPrice
from remat.whole_step.microbatch import StateKind
from remat.whole_step.step_planning import StepRequest, plan_step
from remat.whole_step.step_screen import show_step, step_json

if TYPE_CHECKING:
    from remat.rewriter.checking.check import Check


_CheckAnyway = Annotated[
    bool, typer.Option("--check", help="run the unmodified step even where memory is short")
]
_CompareRule = Annotated[
    bool, typer.Option("--compare", help="also run square-root checkpointing, and measure it")
]
_STEP_PANEL = "A whole optimizer step, planned and not run"
_ONE_BATCH = (
    "keep", "recompute", "solver", "order", "split", "shard", "optimizer_in_backward", "accumulate",
    "time_limit_s", "gap",
)  # fmt: skip
"""Fields of a request that a whole step is planned without: it is limited by plans, not seconds."""
_Microbatches = Annotated[
    int | None,
    typer.Option(
        help="plan a whole optimizer step of so many such batches, with parameters, gradients and "
        "the state of --optimizer on the device, --host and --nvme; nothing is run",
        rich_help_panel=_STEP_PANEL,
    ),
]
_State = Annotated[
    StateKind,
    typer.Option(
        "--optimizer-state",
        help="with --microbatches: float32, with a master copy of parameters in fewer bytes, or "
        "in the parameter's own type, as torch's optimizers keep it",
        rich_help_panel=_STEP_PANEL,
    ),
]
_NvmeRate = Annotated[
    float | None,
    typer.Option(
        "--nvme-gb-s",
        help="with --microbatches: rate of --nvme each way in 10^9 bytes a second; left out, that "
        "of the drive in the table",
        rich_help_panel=_STEP_PANEL,
    ),
]


@verb(budget="auto")
def run_verb(
    session: Session,
    model: shared_options.Model,
    request: Request,
    price: shared_options.PriceOfGib = False,
    check: _CheckAnyway = False,
    compare: _CompareRule = False,
    output: shared_options.Output = None,
    layout: shared_options.LayoutFile = None,
    dynamic: shared_options.DynamicOption = [],  # noqa: B006 typer copies it
    microbatches: _Microbatches = None,
    state: _State = "float32",
    nvme_gb_s: _NvmeRate = None,
) -> None:
    """Capture, time, solve, rewrite and check: the whole job, on one screen."""
    if microbatches is not None or nvme_gb_s is not None or state != "float32":
        given = {
            "--price-of-gib": price, "--check": check, "--compare": compare,
            "--dynamic": bool(dynamic),
        }  # fmt: skip
        flags = next((flag for flag, is_given in given.items() if is_given), "")
        _refuse_beside_microbatches(microbatches is None, output or layout or flags, request)
        asked = StepRequest(
            request.device, microbatches or 0, request.optimizer, request.budget,
            request.host or None, request.nvme or None, state, nvme_gb_s,
        )  # fmt: skip
        _run_whole_step(session, model, request, asked)
        return
    if dynamic:
        alone = {"--price-of-gib": price, "--compare": compare, "--layout": layout is not None}
        refuse_beside_dynamic(request, **alone)
        conclude_over(session, model, request, dynamic, output, is_run=True, check=check)
        return
    loaded = load_shown(model, session.stopwatch, request.device)
    report = pipeline.run_job(
        loaded, request, session.stopwatch, check=check, compare=compare,
        planned=lambda known: _keep(session, output, loaded, known),
    )  # fmt: skip
    report = replace(report, seconds=session.stopwatch.accounted())
    placed = save_layout_file(session, layout, report.graph, report.result)
    worth = priced(session, report.graph, report.result, request) if price else None
    if session.as_json:
        session.emit(json_report.report_json(report) | layout_entry(placed) | price_entry(worth))
    _conclude_run(session, report, placed, worth)


def _run_whole_step(session: Session, model: str, request: Request, asked: StepRequest) -> None:
    """Plan an optimizer step of several batches, and print it beside named systems."""
    loaded = load_shown(model, session.stopwatch, request.device)
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
    """Raise `SolverError` for options that do not go together."""
    if is_left_out:
        raise SolverError(
            "--nvme-gb-s and --optimizer-state are of a whole step: give --microbatches too"
        )
    if kept:
        raise SolverError(
            f"{kept} goes with a plan that runs, and one of --microbatches is planned and not run: "
            "leave it out, --json prints what was found"
        )
    usual = Request()
    for name in _ONE_BATCH:
        if getattr(request, name) != getattr(usual, name):
            flag = FIELDS[name].metadata.get("flag", f"--{name.replace('_', '-')}")
            raise SolverError(
                f"{flag} is of the step of one batch: leave it out, or --microbatches"
            )


def _keep(session: Session, path: Path | None, loaded: Loaded, report: pipeline.Report) -> None:
    if path is not None and report.recipe is not None:
        save_plan_file(
            session, path, plan_of_result(loaded, report.recipe, report.graph, report.result)
        )


def _conclude_run(
    session: Session, report: pipeline.Report, layout: Layout | None, price: GibPrice | None
) -> None:
    """Print the screen, unless JSON was, and end with the code that fits."""
    if report.result.schedule is None:
        session.conclude(INFEASIBLE, [infeasible_text(report.result)])
    if not session.as_json:
        show_run(session.out, report)
        show_layout(session, layout)
        show_price(session, price)
    session.conclude(CHECK_FAILED, report.failures)


@verb(COUNTED)
def check_verb(
    session: Session,
    model: shared_options.Model,
    plan: shared_options.PlanArgument,
    request: Request,
    device: shared_options.Here = CPU,
) -> None:
    """Rewrite MODEL to a kept plan and compare it with eager, bit for bit."""
    kept, request = read_kept(plan), replace(request, device=device)
    loaded = load_shown(model, session.stopwatch, device)
    if isinstance(kept, Plan) and kept.over is not None:
        _check_over(session, loaded, kept, request)
        return
    schedule = fitting_schedule(kept, loaded, str(plan))
    with session.stopwatch.stage("capture", "tracing the training step"):
        traced = pipeline.trace_loaded(loaded, request)
        schedule.check_captured_as(traced.graph)
    with session.stopwatch.stage("check", "checking the plan against eager"):
        found = pipeline.check_schedule(loaded, traced, schedule, request, costed_graph_in(kept))
    _conclude_check(session, found, schedule.budget_bytes)


def _check_over(session: Session, loaded: Loaded, kept: Plan, request: Request) -> None:
    """Check a plan for a range at the sizes of the factory's batch."""
    from remat.rewriter.plans.loading import load

    assert kept.over is not None
    with session.stopwatch.stage("check", "checking the plan against eager"):
        module = load(kept, loaded.model, loss_fn=loaded.loss_fn)
        found = pipeline.compare_with_eager(loaded, module, request)
    _conclude_check(session, found, kept.over.family.budget_bytes)


def _conclude_check(session: Session, found: Check, budget_bytes: int) -> None:
    """Print what was equal, and end with the code that fits."""
    failed = failures(found, budget_bytes)
    if session.as_json:
        session.emit(json_report.checked_json(found, budget_bytes, failed))
    else:
        show_check(session.out, found, budget_bytes)
    session.conclude(CHECK_FAILED, failed)


# The verbs that plan: `capture`, `solve` and `rewrite`.


@verb(CAPTURED)
def capture_verb(
    session: Session,
    model: shared_options.Model,
    request: Request,
    output: shared_options.Output = None,
) -> None:
    """Trace one training step of MODEL, and measure what each op costs."""
    loaded = load_shown(model, session.stopwatch, request.device)
    graph = captured_model(loaded, request, session.stopwatch).graph
    session.save(output, graph.to_json(), "graph")
    if session.as_json:
        session.emit(msgspec.to_builtins(graph))
    else:
        _show_graph(session, graph)


@verb(budget="auto")
def solve_verb(
    session: Session,
    source: shared_options.GraphOrModel,
    request: Request,
    price: shared_options.PriceOfGib = False,
    output: shared_options.Output = None,
    layout: shared_options.LayoutFile = None,
    dynamic: shared_options.DynamicOption = [],  # noqa: B006 typer copies it
) -> None:
    """Find the fastest schedule that fits the budget."""
    if dynamic:
        refuse_beside_dynamic(request, **{"--price-of-gib": price, "--layout": layout is not None})
        conclude_over(session, source, request, dynamic, output)
        return
    source_of = captured(source, request, session.stopwatch)
    graph = source_of.graph
    result = pipeline.solve_request(graph, request, session.stopwatch)
    again = pipeline.runs_again(graph, result)
    save_result_file(session, output, source_of, result)
    placed = save_layout_file(session, layout, graph, result)
    worth = priced(session, graph, result, request) if price else None
    if session.as_json:
        session.emit(
            json_report.result_json(graph, result, again)
            | layout_entry(placed)
            | price_entry(worth)
        )
    elif result.schedule:
        show_result(session.out, graph, result, again)
        show_layout(session, placed)
        show_price(session, worth)
    session.conclude(INFEASIBLE, [] if result.schedule else [infeasible_text(result)])


@verb(COUNTED)
def rewrite_verb(
    session: Session,
    model: shared_options.Model,
    plan: shared_options.PlanArgument,
    request: Request,
    device: shared_options.Here = CPU,
    output: shared_options.Output = None,
) -> None:
    """Print the forward and backward graphs of MODEL rewritten to a kept plan."""
    kept, request = read_kept(plan), replace(request, device=device)
    loaded = load_shown(model, session.stopwatch, device)
    schedule = fitting_schedule(kept, loaded, str(plan))
    with session.stopwatch.stage("rewrite", "rewriting"):
        from remat.rewriter.rewriting import rewrite

        traced = pipeline.trace_loaded(loaded, request)
        module = rewrite(loaded.model, schedule, trace=traced, costed=costed_graph_in(kept))
    text = str(module)
    session.save(output, text.encode(), "code")
    if session.as_json:
        session.emit({"code": text})
    elif output is None:
        session.out.print(text, soft_wrap=True)


def _show_graph(session: Session, graph: TrainingGraph) -> None:
    backward = len(graph.ops) - graph.n_forward
    ops = f", {graph.n_forward} forward and {backward} backward ops"
    costs = f", {time_text(graph.time_us)}, {graph.cost_origin} on {graph.device}\n"
    session.out.print(Text.assemble((graph.name, "bold"), ops, costs))
    table = plain_table("resident", "bytes")
    resident = msgspec.to_builtins(graph.resident)
    if not graph.resident.libraries_bytes:
        del resident["libraries_bytes"]
    for name, size_bytes in resident.items():
        table.add_row(name.removesuffix("_bytes"), bytes_text(size_bytes))
    session.out.print(table)
    if graph.links is not None:
        room = bytes_text(graph.links.host_bytes)
        session.out.print(f"host {room}: {graph.links.source}", markup=False)
