"""The verb `inspect`: what a step holds, and what a plan keeps, makes again and frees."""

from __future__ import annotations

from typing import Annotated

import typer

from remat.cli import options
from remat.cli.outcome import (
    keep_layout,
    opened_feasible,
    said_layout,
    said_range,
    show_layout,
    show_range,
)
from remat.cli.session import Session
from remat.cli.verb import verb
from remat.job.request import Request
from remat.questions.inspect import inspect
from remat.questions.inspection import By, inspection_screen

SumsBy = Annotated[By, typer.Option(help="one row a value, or sums by module, op or line")]
AtPeak = Annotated[bool, typer.Option("--at-peak", help="only what is live at the plan's peak")]
Only = Annotated[
    list[str],
    typer.Option("--only", metavar="GLOB", help="of modules, values, ops or lines; repeatable"),
]


@verb()
def inspect_verb(
    session: Session,
    source: options.Anything,
    request: Request,
    plan: options.PlanOption = None,
    by: SumsBy = "value",
    at_peak: AtPeak = False,
    only: Only = [],  # noqa: B006 typer copies it
    top: options.Top = 20,
    layout: options.LayoutFile = None,
) -> None:
    """Show what is kept, recomputed and freed: sizes, places and prices, equal layers folded."""
    opened = opened_feasible(session, source, request, plan)
    found = inspect(opened.graph, opened.result, by=by, only=only, at_peak=at_peak)
    placed = keep_layout(session, layout, opened.graph, opened.solved) if layout else None
    if session.as_json:
        session.emit(found.as_json() | said_layout(placed) | said_range(opened.over))
    else:
        session.out.print(inspection_screen(found, top, session.out.width))
        show_layout(session, placed)
        show_range(session, opened.over)
