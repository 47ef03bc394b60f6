"""What several verbs do with an outcome: open it or end, keep it as a file, and place buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remat.cli.session import INFEASIBLE, Session
from remat.graph_capture.graph import TrainingGraph
from remat.job.plan_source import Captured, PlanSource, open_plan, plan_of_result, write_plan
from remat.job.request import Request
from remat.placed import arena_text, layout_json, place
from remat.schedules.layout import Layout
from remat.schedules.plan import PlanFile
from remat.schedules.schedule import Schedule
from remat.solved import infeasible_text
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


def save_result_file(session: Session, path: Path | None, of: Captured, result: Result) -> None:
    """A plan where a model is at hand, else the schedule alone; nothing where nothing fits."""
    if path is None or result.schedule is None:
        return
    if of.loaded is not None and of.recipe is not None:
        save_plan_file(session, path, plan_of_result(of.loaded, of.recipe, of.graph, result))
    else:
        session.save(path, result.schedule.to_json(), "plan")


def save_plan_file(session: Session, path: Path, plan: PlanFile | None) -> None:
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
