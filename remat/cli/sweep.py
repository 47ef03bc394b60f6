"""The verb that solves at many budgets: `sweep`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from remat.budgets import parse_budget
from remat.cli import options
from remat.cli.session import INFEASIBLE, Session
from remat.cli.verb import verb
from remat.formats import bytes_text, percent_text, proved_text, time_text
from remat.graph_capture.devices.lower_tiers import AUTO
from remat.graph_capture.devices.sizes import written_bytes
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.job.kept_plans import PLAN_FILES
from remat.job.opened import captured
from remat.job.request import Request
from remat.questions.sweep import Budgets, sweep, sweep_hosts
from remat.questions.tables import plain_table
from remat.schedules.simulate import bound_of
from remat.solver import make_solver
from remat.solver.budgets.front import Front
from remat.solver.budgets.sweep import BudgetsDone, check_jobs

if TYPE_CHECKING:
    from remat.graph_capture.tracing.trace import Shown

BUDGETS = "12"
HOSTS = "8GiB, or several with 0 for none: 0,8GiB,16GiB"
BudgetList = Annotated[
    str,
    typer.Option(
        help="how many, from the least peak to the unmodified one, or 50%,2GiB,...; "
        f"{BUDGETS} where none is named",
        show_default=False,
    ),
]
Jobs = Annotated[int, typer.Option(help="solves at once; -1 for every core")]


@verb()
def sweep_verb(
    session: Session,
    source: options.GraphOrModel,
    request: Request,
    budgets: BudgetList = "",
    budget: list[str] = [],  # noqa: B006 typer copies it
    solver: list[str] = ["auto"],  # noqa: B006
    host: str = "",
    nvme: str = "",
    jobs: Jobs = 1,
    output: options.Output = None,
) -> None:
    """Show the time of the step against the budget, with the bound at each."""
    wanted = asked_budgets(budgets, budget)
    for name in solver:
        make_solver(name, order=request.order, gap=request.gap)
    check_jobs(jobs)
    hosts = asked_hosts(host)
    largest = max(hosts, key=hosts.__getitem__, default="")
    is_kept = source.endswith(PLAN_FILES)
    asked = replace(request, host=largest if any(hosts.values()) else "", nvme=nvme)
    graph = captured(source, asked.checked(is_kept=is_kept), session.stopwatch).graph
    with session.stopwatch.stage("sweep", "solving at several budgets") as progress:
        shared: dict[str, Any] = {
            "solvers": solver, "time_limit_s": request.time_limit_s, "jobs": jobs,
            "progress": _telling(progress), **request.solving,
        }  # fmt: skip
        if len(hosts) > 1:
            fronts = sweep_hosts(graph, hosts, wanted, **shared)
        else:
            fronts = sweep(graph, wanted, **shared)
    session.save(output, _kept(fronts), "front")
    if session.as_json:
        session.emit({"fronts": {n: msgspec.to_builtins(f) for n, f in fronts.items()}})
    else:
        _show_fronts(session, graph, fronts)
    found = any(point.result.schedule for front in fronts.values() for point in front.points)
    session.conclude(INFEASIBLE, [] if found else ["no schedule was found at any budget"])


def asked_budgets(text: str, named: Sequence[str] = (), default: str = BUDGETS) -> Budgets:
    """How many budgets, or which: what ``--budgets`` says, or each that ``--budget`` names.

    Raises
    ------
    BudgetError : both are given; neither a number from 1 on nor budgets parted by commas.
    """
    if text and named:
        raise BudgetError(f"name budgets by --budget or by --budgets {text}, not by both")
    text = text or ",".join(named) or default
    if not named and text.strip().lstrip("+-").isdigit():
        if int(text) < 1:
            raise BudgetError(f"budgets {text!r}: ask for 1 or more, or list them: 50%,60%,2GiB")
        return int(text)
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        parse_budget(part)
    return parts


def asked_hosts(text: str) -> dict[str, int]:
    """Bytes of the host by what each is called: ``0,8GiB,16GiB``, of which 0 is without one.

    Several are compared, so that each has a size; one alone may be ``auto``.

    Raises
    ------
    BudgetError : one is no size, or two are the same.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if parts == [AUTO]:
        return {AUTO: 1}
    hosts = {part: 0 if part == "0" else written_bytes(part, "host", HOSTS) for part in parts}
    if len(set(hosts.values())) < len(parts):
        raise BudgetError(f"hosts {text!r} name the same size twice: give each once")
    return hosts


def _telling(progress: Shown) -> BudgetsDone:
    def tell(done: int, total: int) -> None:
        progress(done, total, text=f"budget {done + 1} of {total}")

    return tell


def _kept(fronts: Mapping[str, Front]) -> bytes:
    """One front as such, several by the solver's name."""
    if len(fronts) == 1:
        return next(iter(fronts.values())).to_json()
    return msgspec.json.encode(fronts)


def _show_fronts(session: Session, graph: TrainingGraph, fronts: Mapping[str, Front]) -> None:
    step = f", step {time_text(graph.time_us)} with nothing recomputed\n"
    session.out.print(Text.assemble((graph.name, "bold"), step))
    table = plain_table("budget", "peak", "overhead", "bound", "gap", "solver", "seconds")
    for name, front in fronts.items():
        _add_rows(table, name, front)
    session.out.print(table)


def _add_rows(table: Table, solver: str, front: Front) -> None:
    """One row a budget; an infeasible one says so where its peak would be."""
    for budget_bytes, result in front.points:
        figures = (result.status, "-", "-", "-")
        if result.schedule is not None:
            bound = bound_of(result.lower_bound_us, front.base_us)
            figures = (
                bytes_text(result.peak_bytes),
                percent_text(result.overhead),
                proved_text(bound),
                "-" if result.gap is None else percent_text(result.gap),
            )
        table.add_row(bytes_text(budget_bytes), *figures, solver, f"{result.wall_s:.1f}")
