"""The verb `sweep`: the step's time at several budgets, by one solver or several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from remat.analysis.budget_sweep import Budgets
from remat.analysis.compare import DEFAULT_BUDGETS, DEFAULT_SOLVERS, sweep, sweep_hosts
from remat.budgets import parse_budget
from remat.cli.session import INFEASIBLE, Session
from remat.cli.verb import verb
from remat.formats import bytes_text, percent_text, plain_table, proved_text, time_text
from remat.graph_capture.devices.known_devices import has_cuda_allocator, parse_bytes
from remat.graph_capture.devices.memory import AUTO
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.job.plan_source import PLAN_FILES, captured, open_plan
from remat.job.request import Request
from remat.schedules.simulate import bound_of
from remat.solver import make_solver, solver_class
from remat.solver.budgets.front import Front
from remat.solver.budgets.sweep import check_jobs

_SWEPT, _COMPARED = "12", ",".join(DEFAULT_BUDGETS)  # of one solver, and of several
_SOLVING = "solving at several budgets"
_NOTHING = "no schedule was found at any budget"
_ALL = "usual"  # the best of each kind, and what people write by hand
_HOSTS = "8GiB, or several with 0 for none: 0,8GiB,16GiB"
_SweptBudgets = Annotated[str, typer.Option(
    help="how many, from the least peak to the unmodified one, or a list: 50%,2GiB; default: "
    f"{_SWEPT}, with several solvers {_COMPARED}", show_default=False,
)]  # fmt: skip


@verb()
def sweep_verb(
    session: Session, source: str, request: Request, budgets: _SweptBudgets = "",
    budget: list[str] = [], solver: list[str] = ["auto"],  # noqa: B006 typer copies it
    plan: Path | None = None, host: str = "", nvme: str = "", jobs: int = 1,
    place: bool = False, output: Path | None = None,
) -> None:  # fmt: skip
    """Show the step's time and its lower bound at several budgets, or compare solvers.

    Give --solver several times, or --plan, to compare them with the unmodified step.
    """
    # "usual" stands for several, so it is replaced before solvers are counted.
    names = [one for name in solver for one in (DEFAULT_SOLVERS if name == _ALL else (name,))]
    hosts = asked_hosts(host)
    is_compared = (len(names) > 1 and len(hosts) < 2) or plan is not None or place
    if is_compared and len(hosts) > 1:
        raise BudgetError(f"give one host size with --plan or --place: {host} names several")
    wanted = asked_budgets(budgets, budget, _COMPARED if is_compared else _SWEPT)
    for one in names:
        # A comparison has a row for a solver that does not take the order.
        solver_class(one) if is_compared else make_solver(one, order=request.order, gap=request.gap)
    check_jobs(jobs)
    largest = max(hosts, key=hosts.__getitem__, default="")  # more than there is is refused now
    asked = replace(request, host=largest if any(hosts.values()) else "", nvme=nvme)
    asked = asked.checked(is_kept=source.endswith(PLAN_FILES))
    given: dict[str, Any] = {"time_limit_s": asked.time_limit_s, "jobs": jobs, **asked.solving}
    if is_compared:
        opened = open_plan(source, asked, session.stopwatch, plan)
        with session.stopwatch.stage("compare", _SOLVING) as show:
            given["progress"] = lambda name, i, n: show(i, n, text=f"solving with {name}")
            given |= {"plan": opened.result, "layouts": place}
            found = sweep(opened.graph, wanted, names, **given)
        fronts, said, screen = found.fronts, found.as_json(), found.screen(session.out.width)
        fits = any(cell.fits for row in found.rows for cell in row.cells)
    else:
        graph = captured(source, asked, session.stopwatch).graph
        with session.stopwatch.stage("sweep", _SOLVING) as show:
            given["progress"] = lambda _, i, n: show(i, n, text=f"budget {i + 1} of {n}")
            if len(hosts) > 1:
                fronts = sweep_hosts(graph, hosts, wanted, names, **given)
            else:
                fronts = sweep(graph, wanted, names, **given).fronts
        said, screen = {"fronts": msgspec.to_builtins(fronts)}, _fronts_screen(graph, fronts)
        fits = any(point.result.schedule for front in fronts.values() for point in front.points)
    # One is kept as such, so that `Front.from_json` reads it.
    alone = next(iter(fronts.values())) if len(fronts) == 1 else None
    session.save(output, alone.to_json() if alone else msgspec.json.encode(fronts), "front")
    session.answer(said, screen)
    session.conclude(INFEASIBLE, [] if fits else [_NOTHING])


def asked_budgets(text: str, named: Sequence[str] = (), default: str = _SWEPT) -> Budgets:
    """How many budgets, or which: what ``--budgets`` says, or each that ``--budget`` names."""
    if text and named:
        raise BudgetError(f"give --budget or --budgets {text}, not both")
    text = text or ",".join(named) or default
    if not named and text.strip().lstrip("+-").isdigit():  # -3 is no number of budgets
        if int(text) < 1:
            raise BudgetError(f"budgets {text!r}: ask for 1 or more, or list them: 50%,60%,2GiB")
        return int(text)
    parts = [part.strip() for part in text.split(",")]
    for part in parts:  # read once before the capture, so that a wrong one costs no time
        parse_budget(part)
    return parts


def asked_hosts(text: str) -> dict[str, int]:
    """``0,8GiB,16GiB`` in bytes by what each is called; 0 is without a host."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if parts == [AUTO]:  # several are compared, so that each has a size; one alone need not
        return {AUTO: 1}  # any size but 0, as it is asked for when the graph is captured
    hosts = {part: 0 if part == "0" else parse_bytes(part, "host", _HOSTS) for part in parts}
    if len(set(hosts.values())) < len(parts):
        raise BudgetError(f"give each host size once: {text!r} names one twice")
    return hosts


def _fronts_screen(graph: TrainingGraph, fronts: Mapping[str, Front]) -> RenderableType:
    bounded = ", budgets of allocated memory" * has_cuda_allocator(graph.device)
    step = f", step {time_text(graph.time_us)} with nothing recomputed{bounded}\n"
    table = plain_table("budget", "peak", "overhead", "bound", "gap", "solver", "seconds")
    points = [(name, front, point) for name, front in fronts.items() for point in front.points]
    for name, front, (budget_bytes, result) in points:
        figures = (result.status, "-", "-", "-")  # what became of it is said in place of a peak
        if result.schedule is not None:
            bound = bound_of(result.lower_bound_us, front.base_us)
            gap = "-" if result.gap is None else percent_text(result.gap)
            peak, overhead = bytes_text(result.peak_bytes), percent_text(result.overhead)
            figures = (peak, overhead, proved_text(bound), gap)
        table.add_row(bytes_text(budget_bytes), *figures, name, f"{result.wall_s:.1f}")
    return Group(Text.assemble((graph.name, "bold"), step), table)
