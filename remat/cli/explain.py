"""The verb `explain`: why a plan is as it is, and what the alternatives cost."""

from __future__ import annotations

from typing import Annotated

import typer

from remat.cli import options
from remat.cli.outcome import opened_feasible
from remat.cli.session import Session
from remat.cli.verb import verb
from remat.job.request import Request
from remat.questions.explain import EACH_S, explain
from remat.questions.explanation import explanation_screen
from remat.solver.interrupts import is_interrupted

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
) -> None:
    """Say who holds the peak, what memory is worth, what was forced, and if a rule would do."""
    opened = opened_feasible(session, source, request, plan)
    if is_interrupted():  # the best plan found until then; its questions are left out
        raise KeyboardInterrupt
    with session.stopwatch.stage("explain", "explaining the plan") as progress:
        found = explain(
            opened.graph,
            opened.solved,
            why_of=why,
            each_s=each_limit,
            progress=lambda part: progress(text=DOING[part]),
        )
    if session.as_json:
        session.emit(found.as_json())
    else:
        session.out.print(explanation_screen(found))
