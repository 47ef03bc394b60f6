"""The verb `compare`: budgets against solvers and hand-written rules, with the bound."""

from __future__ import annotations

from typing import Annotated

import typer

from remat.cli import options
from remat.cli.session import INFEASIBLE, Session
from remat.cli.sweep import asked_budgets
from remat.cli.verb import verb
from remat.job.opened import open_plan
from remat.job.request import Request
from remat.questions.compare import DEFAULT_BUDGETS, DEFAULT_SOLVERS, compare
from remat.questions.comparison import comparison_screen
from remat.solver import solver_class

BUDGETS = ",".join(DEFAULT_BUDGETS)
BudgetList = Annotated[
    str,
    typer.Option(
        help="50%,2GiB,... or how many from the least peak to the unmodified one; "
        f"{BUDGETS} where none is named",
        show_default=False,
    ),
]


@verb()
def compare_verb(
    session: Session,
    source: options.Anything,
    request: Request,
    plan: options.PlanOption = None,
    budgets: BudgetList = "",
    budget: list[str] = [],  # noqa: B006 typer copies it
    solver: list[str] = list(DEFAULT_SOLVERS),  # noqa: B006
    place: options.Place = False,
) -> None:
    """Set solvers and rules side by side at several budgets, and a kept plan among them."""
    wanted = asked_budgets(budgets, budget, BUDGETS)
    for name in solver:
        solver_class(name)
    opened = open_plan(source, request, session.stopwatch, plan)
    with session.stopwatch.stage("compare", "solving at several budgets") as progress:
        found = compare(
            opened.graph, wanted, solver, plan=opened.result, time_limit_s=request.time_limit_s,
            progress=lambda name, done, total: progress(done, total, text=f"solving with {name}"),
            place=place, **request.solving,
        )  # fmt: skip
    if session.as_json:
        session.emit(found.as_json())
    else:
        session.out.print(comparison_screen(found, session.out.width))
    fits = any(cell.fits for row in found.rows for cell in row.cells)
    session.conclude(INFEASIBLE, [] if fits else ["no schedule was found at any budget"])
