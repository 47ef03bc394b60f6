"""The verb that solves at many budgets: `sweep`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from remat.budgets import parse_budget
from remat.cli import options
from remat.cli.asked import asked, conclude
from remat.cli.plan import GraphOrModel
from remat.cli.session import INFEASIBLE, Session
from remat.formats import bytes_text, percent_text, time_text
from remat.graph_capture.derived.sharding import Sharding
from remat.graph_capture.devices.device_table import CPU
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.job import pipeline
from remat.job.opened import NO_BUDGET, captured
from remat.questions.sweep import Budgets
from remat.questions.sweep import sweep as sweep_graph
from remat.questions.tables import plain_table
from remat.schedules.simulate import overhead_of
from remat.solver import TABLE, make_solver
from remat.solver.budgets.front import Front
from remat.solver.budgets.sweep import BudgetsDone, check_jobs

BudgetList = Annotated[
    str, typer.Option(help="how many, from the least peak to the unmodified one, or 50%,2GiB,...")
]
Solvers = Annotated[
    list[str], typer.Option("--solver", help="repeatable; one of " + ", ".join(TABLE))
]
Jobs = Annotated[int, typer.Option(help="solves at once; -1 for every core")]
LimitOfAll = Annotated[
    float, typer.Option(min=0.0, help="seconds to search, all budgets of a solver together")
]


def sweep(
    source: GraphOrModel,
    budgets: BudgetList = "12",
    solver: Solvers = ["auto"],  # noqa: B006 typer copies it
    order: options.Order = options.OrderName.fixed,
    time_limit: LimitOfAll = 60.0,
    jobs: Jobs = 1,
    keep: options.Keep = [],  # noqa: B006
    recompute: options.Recompute = [],  # noqa: B006
    optimizer: options.Optimizer = options.OptimizerName.none,
    accumulate: options.Accumulate = False,
    device: options.Device = CPU,
    shard: options.Shard = options.ShardName.none,
    world_size: options.WorldSize = 1,
    shard_blocks: options.ShardBlocks = "",
    profile: options.ProfileFile = None,
    output: options.Output = None,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Show the time of the step against the budget, with the bound at each."""
    session = Session(as_json=as_json, debug=debug)
    with session.guarded():
        session.require_folder(output)
        wanted = asked_budgets(budgets)
        _refuse_unknown(solver, order.value, jobs)
        sharding = Sharding(shard.value, world_size, shard_blocks)
        request = asked(
            NO_BUDGET, solver[0], order, time_limit, optimizer, accumulate, device=device,
            profile=profile, sharding=sharding,
        )  # fmt: skip
        graph = captured(source, request, session.stages).graph
        with session.stages.stage("sweep", "solving at several budgets") as progress:
            fronts = sweep_graph(
                graph, wanted, solvers=solver, time_limit_s=time_limit, jobs=jobs,
                tell=_telling(progress), keep=keep, recompute=recompute, order=order.value,
            )  # fmt: skip
        session.save(output, _kept(fronts), "front")
        if as_json:
            session.emit({"fronts": {n: msgspec.to_builtins(f) for n, f in fronts.items()}})
        else:
            _show(session, graph, fronts)
        found = any(point.result.schedule for front in fronts.values() for point in front.points)
        conclude(session, INFEASIBLE, [] if found else ["no schedule was found at any budget"])


def asked_budgets(text: str) -> Budgets:
    """How many budgets, or which.

    Raises
    ------
    BudgetError : neither a number from 1 on nor budgets parted by commas.
    """
    if text.strip().lstrip("+-").isdigit():
        if int(text) < 1:
            raise BudgetError(f"budgets {text!r}: ask for 1 or more, or list them: 50%,60%,2GiB")
        return int(text)
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        parse_budget(part)
    return parts


def _refuse_unknown(solvers: list[str], order: str, jobs: int) -> None:
    for name in solvers:
        make_solver(name, order=order)
    check_jobs(jobs)


def _telling(progress: pipeline.Progress) -> BudgetsDone:
    def tell(done: int, total: int) -> None:
        progress(done, total, text=f"budget {done + 1} of {total}")

    return tell


def _kept(fronts: Mapping[str, Front]) -> bytes:
    """One front as such, several by the solver's name."""
    if len(fronts) == 1:
        return next(iter(fronts.values())).to_json()
    return msgspec.json.encode(fronts)


def _show(session: Session, graph: TrainingGraph, fronts: Mapping[str, Front]) -> None:
    session.out.print(
        f"[bold]{graph.name}[/], step {time_text(graph.time_us)} with nothing recomputed\n"
    )
    table = plain_table("budget", "peak", "overhead", "bound", "gap", "solver", "seconds")
    for name, front in fronts.items():
        add_rows(table, name, front)
    session.out.print(table)


def add_rows(table: Table, solver: str, front: Front) -> None:
    """One row a budget; an infeasible one says so where its peak would be."""
    for budget_bytes, result in front.points:
        figures = (result.status, "-", "-", "-")
        if result.schedule is not None:
            bound = overhead_of(result.lower_bound_us, front.base_us)
            figures = (
                bytes_text(result.peak_bytes),
                percent_text(result.overhead),
                percent_text(bound),
                percent_text(result.gap),
            )
        table.add_row(bytes_text(budget_bytes), *figures, solver, f"{result.wall_s:.1f}")
