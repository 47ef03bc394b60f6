"""The verb `compare`: budgets against solvers and hand-written rules, with the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from remat.analysis.budget_sweep import Budgets, sweep, sweep_hosts
from remat.analysis.compare import DEFAULT_BUDGETS, DEFAULT_SOLVERS, compare, comparison_screen
from remat.analysis.explain import FURTHER_SOLVE_S, explain
from remat.analysis.explanation import Explanation, explanation_screen
from remat.analysis.inspect import InspectBy, inspect, inspection_screen
from remat.analysis.plan_report import plain_table
from remat.budgets import parse_budget
from remat.cli import shared_options
from remat.cli.output import (
    layout_entry,
    note_unproved,
    opened_feasible,
    place_shown,
    range_entry,
    save_layout_file,
    show_layout,
    show_range,
)
from remat.cli.session import INFEASIBLE, Session
from remat.cli.verb import verb
from remat.formats import bytes_text, percent_text, proved_text, time_text
from remat.graph_capture.devices.known_devices import parse_bytes
from remat.graph_capture.devices.memory import AUTO
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.job import pipeline
from remat.job import screen as json_report
from remat.job.plan_source import PLAN_FILES, PlanSource, captured, open_plan
from remat.job.request import Request
from remat.job.screen import show_result
from remat.schedules.simulate import bound_of
from remat.solver import make_solver, solver_class
from remat.solver.budgets.front import Front
from remat.solver.budgets.sweep import BudgetsDone, check_jobs
from remat.solver.search import is_interrupted, note_interrupt

if TYPE_CHECKING:
    from remat.graph_capture.tracing.trace import ProgressCallback


# The verb that solves at many budgets: `sweep`.


_SWEPT = "12"
_HOSTS = "8GiB, or several with 0 for none: 0,8GiB,16GiB"
_SweptBudgets = Annotated[
    str,
    typer.Option(
        help="how many, from the least peak to the unmodified one, or 50%,2GiB,...; "
        f"{_SWEPT} where none is named",
        show_default=False,
    ),
]
_Jobs = Annotated[int, typer.Option(help="solves at once; -1 for every core")]


@verb()
def sweep_verb(
    session: Session,
    source: shared_options.GraphOrModel,
    request: Request,
    budgets: _SweptBudgets = "",
    budget: list[str] = [],  # noqa: B006 typer copies it
    solver: list[str] = ["auto"],  # noqa: B006
    host: str = "",
    nvme: str = "",
    jobs: _Jobs = 1,
    output: shared_options.Output = None,
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


def asked_budgets(text: str, named: Sequence[str] = (), default: str = _SWEPT) -> Budgets:
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
    hosts = {part: 0 if part == "0" else parse_bytes(part, "host", _HOSTS) for part in parts}
    if len(set(hosts.values())) < len(parts):
        raise BudgetError(f"hosts {text!r} name the same size twice: give each once")
    return hosts


def _telling(progress: ProgressCallback) -> BudgetsDone:
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


_BUDGETS = ",".join(DEFAULT_BUDGETS)
_BudgetList = Annotated[
    str,
    typer.Option(
        help="50%,2GiB,... or how many from the least peak to the unmodified one; "
        f"{_BUDGETS} where none is named",
        show_default=False,
    ),
]


@verb()
def compare_verb(
    session: Session,
    source: shared_options.Anything,
    request: Request,
    plan: shared_options.PlanOption = None,
    budgets: _BudgetList = "",
    budget: list[str] = [],  # noqa: B006 typer copies it
    solver: list[str] = list(DEFAULT_SOLVERS),  # noqa: B006
    place: shared_options.PlaceOption = False,
) -> None:
    """Set solvers and rules side by side at several budgets, and a kept plan among them."""
    wanted = asked_budgets(budgets, budget, _BUDGETS)
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


# The verb `explain`: why a plan is as it is, and what the alternatives cost.


_WhyOf = Annotated[
    list[str],
    typer.Option("--why", metavar="GLOB", help="why these values are kept or not; repeatable"),
]
_EachLimit = Annotated[float, typer.Option(min=0.0, help="seconds for each further solve")]
_DOING = {
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
    source: shared_options.Anything,
    request: Request,
    plan: shared_options.PlanOption = None,
    why: _WhyOf = [],  # noqa: B006 typer copies it
    each_limit: _EachLimit = FURTHER_SOLVE_S,
    place: shared_options.PlaceOption = False,
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
            session.emit(found.as_json() | layout_entry(placed))
        else:
            session.out.print(explanation_screen(found))
            show_layout(session, placed)


def _asked_of(
    session: Session, opened: PlanSource, why: list[str], each_limit: float
) -> Explanation | None:
    """The explanation; None where Ctrl-C came before its last part."""
    try:
        with session.stopwatch.stage("explain", "explaining the plan") as progress:
            return explain(
                opened.graph,
                opened.solved,
                why_of=why,
                each_s=each_limit,
                progress=lambda part: progress(text=_DOING[part]),
            )
    except KeyboardInterrupt:
        note_interrupt()
        return None


def _show_plan(session: Session, opened: PlanSource) -> None:
    """The plan that was to be explained, without more solves."""
    again = pipeline.runs_again(opened.graph, opened.solved)
    if session.as_json:
        session.emit(json_report.result_json(opened.graph, opened.solved, again))
    else:
        show_result(session.out, opened.graph, opened.solved, again)


# The verb `inspect`: what a step holds, and what a plan keeps, makes again and frees.


_SumsBy = Annotated[InspectBy, typer.Option(help="one row a value, or sums by module, op or line")]
_AtPeak = Annotated[bool, typer.Option("--at-peak", help="only what is live at the plan's peak")]
_Only = Annotated[
    list[str],
    typer.Option("--only", metavar="GLOB", help="of modules, values, ops or lines; repeatable"),
]


@verb()
def inspect_verb(
    session: Session,
    source: shared_options.Anything,
    request: Request,
    plan: shared_options.PlanOption = None,
    by: _SumsBy = "value",
    at_peak: _AtPeak = False,
    only: _Only = [],  # noqa: B006 typer copies it
    top: shared_options.Top = 20,
    layout: shared_options.LayoutFile = None,
) -> None:
    """Show what is kept, recomputed and freed: sizes, places and costs, equal layers folded."""
    opened = opened_feasible(session, source, request, plan)
    found = inspect(opened.graph, opened.result, by=by, only=only, at_peak=at_peak)
    placed = save_layout_file(session, layout, opened.graph, opened.solved) if layout else None
    if session.as_json:
        session.emit(found.as_json() | layout_entry(placed) | range_entry(opened.over))
    else:
        session.out.print(inspection_screen(found, top, session.out.width))
        show_layout(session, placed)
        show_range(session, opened.over)
