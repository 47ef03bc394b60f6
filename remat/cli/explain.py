"""The verb `explain`: why a plan is as it is, and what the alternatives cost."""

from __future__ import annotations

from typing import Annotated

import typer

from remat.cli import options
from remat.cli.outcome import (
    note_unproved,
    opened_feasible,
    place_shown,
    said_layout,
    show_layout,
)
from remat.cli.session import Session
from remat.cli.verb import verb
from remat.job import json_report, pipeline
from remat.job.opened import Opened
from remat.job.request import Request
from remat.job.screen import show_result
from remat.questions.explain import EACH_S, explain
from remat.questions.explanation import Explanation, explanation_screen
from remat.solver.interrupts import is_interrupted, note_interrupt

WhyOf = Annotated[
    list[str],
    typer.Option("--why", metavar="GLOB", help="why these values are kept or not; repeatable"),
]
EachLimit = Annotated[float, typer.Option(min=0.0, help="seconds for each further solve")]
DOING = {
    "why": "solving with single ops pinned the other way",
    "price": "pricing memory",
    "least": "looking for the least budget",
    "rules": "trying simple rules",
    "levers": "solving with a lever off",
    "greedy": "comparing cut with greedy solvers",
}


@verb()
def explain_verb(
    session: Session,
    source: options.Anything,
    request: Request,
    plan: options.PlanOption = None,
    why: WhyOf = [],  # noqa: B006 typer copies it
    each_limit: EachLimit = EACH_S,
    place: options.Place = False,
) -> None:
    """Say who holds the peak, what memory is worth, what was forced, and if a rule would do."""
    opened = opened_feasible(session, source, request, plan)
    note_unproved(session, opened)
    found = None if is_interrupted() else _asked_of(session, opened, why, each_limit)
    if found is None:
        _show_plan(session, opened)
    else:
        schedule = opened.schedule
        placed = place_shown(session, opened.graph, schedule) if place and schedule else None
        if session.as_json:
            session.emit(found.as_json() | said_layout(placed))
        else:
            session.out.print(explanation_screen(found))
            show_layout(session, placed)


def _asked_of(
    session: Session, opened: Opened, why: list[str], each_limit: float
) -> Explanation | None:
    """The explanation; None where Ctrl-C came before its last part."""
    try:
        with session.stopwatch.stage("explain", "explaining the plan") as progress:
            return explain(
                opened.graph,
                opened.solved,
                why_of=why,
                each_s=each_limit,
                progress=lambda part: progress(text=DOING[part]),
            )
    except KeyboardInterrupt:
        note_interrupt()
        return None


def _show_plan(session: Session, opened: Opened) -> None:
    """The plan that was to be explained, without more solves."""
    again = pipeline.runs_again(opened.graph, opened.solved)
    if session.as_json:
        session.emit(json_report.result_json(opened.graph, opened.solved, again))
    else:
        show_result(session.out, opened.graph, opened.solved, again)
