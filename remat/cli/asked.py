"""What the verbs share: the request that was asked for, and how a verb ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.budgets import parse_budget
from remat.cli import options
from remat.cli.session import INFEASIBLE, Session
from remat.graph_capture.derived.sharding import NO_SHARDING, Sharding
from remat.graph_capture.devices.device_table import CPU, check_device
from remat.graph_capture.graph import TrainingGraph
from remat.infeasible import infeasible_text
from remat.job import pipeline
from remat.job.kept_plans import plan_of_result, write_plan
from remat.job.opened import NO_BUDGET, Captured, Opened, open_plan
from remat.questions.sweep import price_json, price_text
from remat.schedules.plan import Plan
from remat.solver import make_solver
from remat.solver.budgets.price import GibPrice
from remat.solver.budgets.worth import price_of_gib
from remat.solver.result import Result

if TYPE_CHECKING:
    from remat.graph_capture.prices.profile import Profile


def keep_plan(session: Session, path: Path, plan: Plan | None) -> None:
    """Write a plan and say so; nothing where nothing fits."""
    if plan is not None:
        write_plan(plan, path)
        session.err.print(f"plan written to {path}", markup=False, soft_wrap=True)


def keep_result(session: Session, path: Path | None, of: Captured, result: Result) -> None:
    """A plan where a model is at hand, else the schedule alone; nothing where nothing fits."""
    if path is None or result.schedule is None:
        return
    if of.loaded is not None and of.recipe is not None:
        keep_plan(session, path, plan_of_result(of.loaded, of.recipe, of.graph, result))
    else:
        session.save(path, result.schedule.to_json(), "plan")


def opened_feasible(
    session: Session, source: str, request: pipeline.Request, plan: Path | None
) -> Opened:
    """A graph and the plan of it, if one is named or asked for; ends where nothing fits."""
    opened = open_plan(source, request, session.stages, plan)
    if opened.result is not None and opened.schedule is None:
        conclude(session, INFEASIBLE, [infeasible_text(opened.result)])
    return opened


def conclude(session: Session, code: int, complaints: list[str]) -> None:
    """Say each complaint and end with `code`; do nothing where there is none."""
    for complaint in complaints:
        session.complain(complaint)
    if complaints:
        raise SystemExit(code)


def asked(
    budget: str,
    solver: str,
    order: options.OrderName,
    time_limit_s: float,
    optimizer: options.OptimizerName,
    accumulate: bool,
    keep: Sequence[str] = (),
    recompute: Sequence[str] = (),
    device: str = CPU,
    profile: Path | None = None,
    sharding: Sharding = NO_SHARDING,
    check: bool = False,
) -> pipeline.Request:
    """The request, refused before anything runs if a part of it is unknown.

    `NO_BUDGET` stands for none.
    """
    if budget != NO_BUDGET:
        parse_budget(budget)
    check_device(device)
    known = read_profile(profile)
    make_solver(solver, order=order.value)
    return pipeline.Request(
        budget, solver, time_limit_s, optimizer.value, accumulate, tuple(keep), tuple(recompute),
        order.value, device, known, sharding, check,
    )  # fmt: skip


def read_profile(path: Path | None) -> Profile | None:
    """The profile kept in that file, if one is given."""
    if path is None:
        return None
    from remat.graph_capture.prices.profile import as_profile

    return as_profile(path)


def priced(
    session: Session, graph: TrainingGraph, result: Result, request: pipeline.Request
) -> GibPrice | None:
    """What a GiB is worth at that result, None where nothing fits."""
    if result.schedule is None:
        return None
    with session.stages.stage("price", "pricing a GiB"):
        return price_of_gib(
            graph, result, solver=request.solver, time_limit_s=request.time_limit_s,
            keep=request.keep, recompute=request.recompute, order=request.order,
        )  # fmt: skip


def said_price(price: GibPrice | None) -> dict[str, Any]:
    """The price as an entry of the JSON object, if there is one."""
    return {} if price is None else {"price_of_gib": price_json(price)}


def show_price(session: Session, price: GibPrice | None) -> None:
    """One line with the price, if there is one."""
    if price is not None:
        session.out.print(f"price  {price_text(price)}")
