"""What verbs do with an outcome: open it or end, keep it as a file, and say what a GiB is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from remat.analysis.budget_sweep import price_json, price_text
from remat.analysis.memory_figures import Offloaded
from remat.cli.session import CHECK_FAILED, INFEASIBLE, Session
from remat.graph_capture.errors import CaptureError, TooLargeError
from remat.graph_capture.graph import TrainingGraph
from remat.job.dynamic import parse_dynamic
from remat.job.pipeline import plan_over
from remat.job.plan_source import (
    PLAN_FILES,
    Captured,
    PlanSource,
    load_shown,
    open_plan,
    plan_of_result,
    write_plan,
)
from remat.job.request import Request
from remat.job.screen import range_json, range_report_json, show_family, show_range_report
from remat.placed import arena_text, layout_json, place
from remat.progress import in_one_line
from remat.ranges.curve import overheads_over
from remat.schedules.layout import Layout
from remat.schedules.plan import Plan, RangeFacts
from remat.schedules.schedule import Schedule
from remat.solved import infeasible_text
from remat.solver.budgets.front import GibPrice
from remat.solver.budgets.sweep import price_of_gib
from remat.solver.result import Result
from remat.solver.search import is_interrupted


def opened_feasible(
    session: Session, source: str, request: Request, plan: Path | None
) -> PlanSource:
    """A graph and the plan of it, if one is named or asked for; ends where nothing fits."""
    opened = open_plan(source, request, session.stopwatch, plan)
    if opened.result is not None and opened.schedule is None:
        session.conclude(INFEASIBLE, [infeasible_text(opened.result)])
    return opened


def conclude_over(
    session: Session, source: str, request: Request, dynamic: Sequence[str], output: Path | None,
    *, is_run: bool = False, check: bool = False,
) -> None:  # fmt: skip
    """Plan a model for a range of sizes, print what was found, and end with the code that fits."""
    ranges = parse_dynamic(dynamic)
    if source.endswith(PLAN_FILES):
        raise CaptureError(f"{source} is of sizes that are fixed: --dynamic goes with a model")
    loaded = load_shown(source, session.stopwatch, request.device)

    def keep(plan: Plan) -> None:
        if output is not None:
            save_plan_file(session, output, plan)

    try:
        report = plan_over(
            loaded, request, ranges, session.stopwatch, keep, is_run=is_run, check=check
        )
    except TooLargeError as error:
        session.fail(INFEASIBLE, type(error).__name__, str(error))
        raise
    report = replace(report, seconds=session.stopwatch.accounted())
    if session.as_json:
        session.emit(range_report_json(report))
    else:
        show_range_report(session.out, report)
    session.conclude(CHECK_FAILED, report.failures)


def note_unproved(session: Session, opened: PlanSource) -> None:
    """Say that the bound which a kept plan states is not taken for proved.

    For verbs that print a bound of the plan on the terminal. A page says it itself.
    """
    if opened.is_kept and opened.solved.message:
        session.err.print(in_one_line(opened.solved.message), soft_wrap=True)


def save_result_file(session: Session, path: Path | None, of: Captured, result: Result) -> None:
    """A plan where a model is at hand, else the schedule alone; nothing where nothing fits."""
    if path is None or result.schedule is None:
        return
    if of.loaded is not None and of.recipe is not None:
        save_plan_file(session, path, plan_of_result(of.loaded, of.recipe, of.graph, result))
    else:
        session.save(path, result.schedule.to_json(), "plan")


def save_plan_file(session: Session, path: Path, plan: Plan | None) -> None:
    """Write a plan and say so; nothing where nothing fits."""
    if plan is not None:
        write_plan(plan, path)
        session.err.print(f"plan written to {path}", soft_wrap=True)


def save_layout_file(
    session: Session, path: Path | None, graph: TrainingGraph, result: Result
) -> Layout | None:
    """Place the buffers of a plan and write their offsets; None where nothing is asked or fits."""
    if path is None or result.schedule is None or is_interrupted():
        return None
    layout = place_shown(session, graph, result.schedule)
    session.save(path, layout.to_json(), "layout")
    return layout


def place_shown(session: Session, graph: TrainingGraph, schedule: Schedule) -> Layout:
    """Place the buffers of a plan, showing that it takes its time."""
    with session.stopwatch.stage("place", "placing buffers"):
        return place(graph, schedule)


def layout_entry(layout: Layout | None) -> dict[str, Any]:
    """The arena as an entry of the JSON object, if there is one."""
    return {} if layout is None else {"layout": layout_json(layout)}


def show_layout(session: Session, layout: Layout | None) -> None:
    """One line with the arena, if there is one."""
    if layout is not None:
        session.out.print(f"arena  {arena_text(layout)}")


def range_entry(over: RangeFacts | None) -> dict[str, Any]:
    """The range of a plan as an entry of the JSON object, if it has one."""
    if over is None:
        return {}
    return {"range": range_json(over.family, overheads_over(over.graph, over.family))}


def show_range(session: Session, over: RangeFacts | None) -> None:
    """The range of a plan, and its curve of overheads, if it has one."""
    if over is not None:
        session.out.print()
        show_family(session.out, over.family, overheads_over(over.graph, over.family))


def priced(
    session: Session, graph: TrainingGraph, result: Result, request: Request
) -> GibPrice | None:
    """What a GiB is worth at that result, None where nothing fits."""
    if result.schedule is None or is_interrupted():
        return None
    with session.stopwatch.stage("price", "pricing a GiB"):
        return price_of_gib(
            graph, result, solver=request.solver, time_limit_s=request.time_limit_s,
            **request.solving,
        )  # fmt: skip


def show_offloaded(session: Session, moved: Offloaded | None) -> None:
    """One line a figure of what a plan moves to the host, if it does."""
    for name, said in moved.rows() if moved is not None else ():
        session.out.print(f"{name}  {said}", markup=False, soft_wrap=True)


def price_entry(price: GibPrice | None) -> dict[str, Any]:
    """The price as an entry of the JSON object, if there is one."""
    return {} if price is None else {"price_of_gib": price_json(price)}


def show_price(session: Session, price: GibPrice | None) -> None:
    """One line with the price, if there is one."""
    if price is not None:
        session.out.print(f"price  {price_text(price)}")
