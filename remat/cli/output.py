"""What several verbs do with an outcome: open it or end, keep it as a file, and place buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from remat.analysis.memory_figures import arena_text, layout_json, place
from remat.cli.session import INFEASIBLE, Session
from remat.graph_capture.graph import TrainingGraph
from remat.job.plan_source import Captured, PlanSource, open_plan, plan_of_result, write_plan
from remat.job.request import Request
from remat.schedules.layout import Layout
from remat.schedules.outcome import Result
from remat.schedules.plan import PlanFile
from remat.schedules.schedule import Schedule
from remat.solved import infeasible_text
from remat.solver.search import is_interrupted


def opened_feasible(session: Session, name: str, request: Request, plan: Path | None) -> PlanSource:
    """A graph and its plan, if one is named or asked for; ends where nothing fits."""
    opened = open_plan(name, request, session.stopwatch, plan)
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
    if plan is not None:
        write_plan(plan, path)  # not by `session.save`: the name may ask for an archive
        session.say_written(path, "plan")


def save_layout_file(
    session: Session, path: Path | None, graph: TrainingGraph, result: Result
) -> Layout | None:
    """None where none is asked for, or nothing fits."""
    # Placing is one more search, and Ctrl-C has ended those.
    if path is None or result.schedule is None or is_interrupted():
        return None
    layout = place_shown(session, graph, result.schedule)
    session.save(path, layout.to_json(), "layout")
    return layout


def place_shown(session: Session, graph: TrainingGraph, schedule: Schedule) -> Layout:
    with session.stopwatch.stage("place", "placing buffers"):
        return place(graph, schedule)


def layout_entry(layout: Layout | None) -> dict[str, Any]:
    return {} if layout is None else {"layout": layout_json(layout)}


def show_layout(session: Session, layout: Layout | None) -> None:
    if layout is not None:
        session.out.print(f"arena  {arena_text(layout)}")
