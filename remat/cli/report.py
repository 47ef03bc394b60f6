"""The verb `report`: a plan as one page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from remat.analysis.plan_figures import check_kept_layout
from remat.cli.session import Session, opened_feasible, save_layout_file
from remat.cli.verb import verb
from remat.cluster.pictures import cluster_page
from remat.cluster.plan_file import is_cluster_plan, read_cluster_plan
from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.errors import DeviceError, LayoutError
from remat.graph_capture.files import read_contents
from remat.job.pipeline import trace_loaded
from remat.job.plan_source import PLAN_FILES, PlanSource, load_shown
from remat.job.request import NAMED_BY_TORCH, Request
from remat.schedules.layout import Layout
from remat.schedules.plan import PlanFile
from remat.schedules.report.page_facts import MeasuredStep


@verb()
def report_verb(
    session: Session, source: str, output: Path, request: Request, plan: Path | None = None,
    front: Path | None = None, measure: bool = False, kept_layout: Path | None = None,
    place: bool = False,
) -> None:  # fmt: skip
    """Write an HTML page about a plan: memory, schedule, tables, time against peak."""
    from remat.analysis.plan_report import fronts_in, page_facts
    from remat.schedules.report.page import render, summary_of

    if source.endswith(PLAN_FILES) and is_cluster_plan(read_contents(source)):
        _report_cluster(session, source, output)
        return
    if measure:
        request = _measured_here(source, request)
    if kept_layout and place:
        raise LayoutError(f"leave out --place or {kept_layout}: each gives a layout")
    # Read first: a bad file is told before a solve.
    known = fronts_in(read_contents(front), str(front)) if front else None
    opened = opened_feasible(session, source, request, plan)
    solved = opened.solved
    layout = _layout(session, opened, kept_layout, place)
    step = _measured(session, source, opened, request) if measure else None
    with session.stopwatch.stage("report", "writing the report"):
        stated_by = front.name if front else ""
        kept = opened.kept if isinstance(opened.kept, PlanFile) else None
        facts = page_facts(opened.graph, solved, known, step, stated_by, layout, kept=kept)
        session.save(output, render(facts).encode(), "report", end=b"")
    if session.as_json:
        summary = msgspec.to_builtins(summary_of(facts))
        said = {"report": str(output), "summary": summary, "note": facts.note}
        session.answer(said, layout=layout)


def _report_cluster(session: Session, source: str, output: Path) -> None:
    from remat.cluster.replayed_plan import replay_of  # imports torch, to replay a pipeline's order

    plan = read_cluster_plan(read_contents(source), source)
    page = cluster_page(plan, replay_of(plan, source))
    session.save(output, page.encode(), "report", end=b"")
    if session.as_json:
        session.emit({"report": str(output), "predicted": msgspec.to_builtins(plan.predicted)})


def _measured_here(source: str, request: Request) -> Request:
    if source.endswith(PLAN_FILES):
        raise DeviceError(
            f"name the model too, MODEL --plan {source}: --measure runs a step, and {source} has "
            "no model"
        )
    here = replace(request, device=CPU)
    if request.device not in (NAMED_BY_TORCH, CPU) or not here.is_run_here:
        raise DeviceError("leave out --device and --sharding: --measure runs a step on this CPU")
    return here


def _layout(session: Session, opened: PlanSource, kept: Path | None, place: bool) -> Layout | None:
    """From a file, or made now; None where neither is asked for."""
    graph, solved = opened.graph, opened.solved
    if kept is None or solved.schedule is None:
        return save_layout_file(session, None, graph, solved, is_asked=place)
    layout = Layout.from_json(read_contents(kept), str(kept))
    check_kept_layout(layout, graph, solved.schedule, str(kept))  # it may be of another plan
    return layout


def _measured(session: Session, source: str, opened: PlanSource, request: Request) -> MeasuredStep:
    from remat.rewriter.checking.measured_step import measured_step
    from remat.rewriter.rewriting import rewrite

    graph, schedule = opened.graph, opened.solved.schedule
    assert schedule is not None
    loaded, request = load_shown(source, session.stopwatch, request, opened.kept)
    with session.stopwatch.stage("measure", "running the step"):
        traced = trace_loaded(loaded, request)
        module = rewrite(loaded.model, schedule, trace=traced, costed=graph)
        return measured_step(
            loaded.model, module, loaded.args, loaded.kwargs,
            loss_fn=loaded.loss_fn, target=loaded.target,
            optimizer=request.optimizer, accumulate=request.accumulate,
        )  # fmt: skip
