"""The report of a plan: one page of HTML, from a graph and a result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import remat.solver as solvers
from remat.budgets import unmodified_step
from remat.graph_capture.errors import ScheduleError, TextError
from remat.graph_capture.files.contents import write_contents
from remat.graph_capture.files.json_text import decoded
from remat.graph_capture.graph import TrainingGraph
from remat.questions.tables import prices_text
from remat.schedules.as_planned import as_planned
from remat.schedules.layout import Layout
from remat.schedules.report.data import page_data
from remat.schedules.report.facts import Alternative, Facts, MeasuredStep
from remat.schedules.report.page import render
from remat.schedules.simulate import simulate
from remat.solver.budgets.front import Front
from remat.solver.result import Result, at_least_budget

RULES = ("full", "every_n_layers", "selective", "chen_sqrt")
"""Rules that people follow by hand, quick to solve; the page shows them beside the plan."""
RULE_S = 0.5
"""Seconds for each rule. On thousands of ops, a rule does not try all settings that it has."""


def report(
    graph: TrainingGraph,
    result: Result,
    path: str | Path | None = None,
    *,
    fronts: Mapping[str, Front] | Front | None = None,
    measured: MeasuredStep | None = None,
    layout: Layout | None = None,
) -> str:
    """The page of a result, as HTML; written to `path` if one is given.

    Parameters
    ----------
    graph : that was solved. fronts : of `remat.sweep`, to draw beside the plan.
    measured : a real step, to draw over the predicted one.
    layout : of `remat.place`, to draw addresses against time.

    Raises
    ------
    ScheduleError : nothing fits, so there is no plan; or it was made for another graph.
    LayoutError : the layout is of another plan, or invalid.
    FileError : the file cannot be written; an old one is as it was.
    """
    facts = page_facts(graph, result, fronts, measured, layout=layout)
    page = render(facts, page_data(facts))
    if path is not None:
        write_contents(path, page.encode())
    return page


def fronts_in(data: bytes, name: str = "the file") -> dict[str, Front]:
    """The fronts in a file that `remat sweep -o` kept, of one solver or of several.

    Raises
    ------
    SolverError : the text is neither.
    """
    try:
        fronts = decoded(data, dict[str, Front])
    except (TextError, ScheduleError):
        front = Front.from_json(data, name)
        return {front.solver: front}
    for front in fronts.values():
        front.check_figures(name)
    return fronts


def page_facts(
    graph: TrainingGraph,
    result: Result,
    fronts: Mapping[str, Front] | Front | None = None,
    measured: MeasuredStep | None = None,
    stated_by: str = "",
    layout: Layout | None = None,
) -> Facts:
    """What the page says of a result; `stated_by` names the file that `fronts` are from, if any."""
    if result.schedule is None:
        raise ScheduleError(
            f"there is no plan to report: nothing within {result.budget_bytes} bytes was found"
        )
    eager = unmodified_step(graph)
    assert eager.result.schedule is not None
    curves = {fronts.solver: fronts} if isinstance(fronts, Front) else dict(fronts or {})
    return Facts(
        graph=as_planned(graph, result.schedule),
        schedule=result.schedule,
        unmodified_graph=eager.graph,
        unmodified_schedule=eager.result.schedule,
        budget_bytes=result.budget_bytes,
        lower_bound_us=result.lower_bound_us,
        status=result.status,
        solver=result.solver,
        rules=(_alternative("unmodified", eager.result), *rules_of(graph, result.budget_bytes)),
        fronts=tuple((name, points_of(graph, front)) for name, front in curves.items()),
        measured=measured,
        prices=prices_text(graph),
        note=result.message,
        stated_by=stated_by,
        layout=layout,
    )


def rules_of(graph: TrainingGraph, budget_bytes: int) -> tuple[Alternative, ...]:
    """Schedules of the simple rules at a budget, or of their least peak where none fits."""
    found: list[Alternative] = []
    for name in RULES:
        result = solvers.solve(graph, budget_bytes, name, time_limit_s=RULE_S)
        if result.schedule is None:
            result = at_least_budget(graph, result)
        if result is not None:
            found.append(_alternative(name, result))
    return tuple(found)


def points_of(graph: TrainingGraph, front: Front) -> tuple[Alternative, ...]:
    """The schedules of a front, judged anew: anyone can edit the file that a front is kept in.

    Raises
    ------
    ScheduleError : the front is of another graph.
    """
    if front.graph_hash != graph.hash:
        raise ScheduleError(
            f"the front of {front.name}, by {front.solver}, is of another graph than the plan of "
            f"{graph.name}: sweep the model and batch of the plan"
        )
    points: list[Alternative] = []
    for budget_bytes, result in front.points:
        if result.schedule is not None:
            found = simulate(graph, result.schedule)
            points.append(
                Alternative(
                    front.solver, found.peak_bytes, found.time_us, found.overhead,
                    budget_bytes, result.lower_bound_us,
                )
            )  # fmt: skip
    return tuple(points)


def _alternative(name: str, result: Result) -> Alternative:
    return Alternative(name, result.peak_bytes, result.time_us, result.overhead)
