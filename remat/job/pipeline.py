"""The main job in one piece: capture, price, solve, rewrite, check, each timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import remat.solver as solvers
from remat.budgets import UNBOUNDED_BYTES, parse_budget, resolve_budget, unmodified
from remat.checks import failures, why_unchecked
from remat.formats import percent_text
from remat.graph_capture.derived.one_rank import on_one_rank
from remat.graph_capture.derived.sharding import NO_SHARDING, Sharding
from remat.graph_capture.devices.device_table import CPU
from remat.graph_capture.graph import Optimizer, TrainingGraph
from remat.job.factory import Loaded
from remat.job.request import Request, Stopwatch
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import Simulation, simulate
from remat.solver.budgets.worth import least_peak
from remat.solver.result import Result

if TYPE_CHECKING:
    from remat.graph_capture.prices.profile import Profile
    from remat.graph_capture.tracing.recipe import Recipe
    from remat.graph_capture.tracing.trace import Trace
    from remat.rewriter.checking.check import Check


@dataclass(frozen=True)
class Row:
    """One schedule, predicted and, where it was run, measured."""

    name: str
    peak_bytes: int
    time_us: float
    overhead: float
    measured_peak_bytes: int | None = None
    measured_step_us: float | None = None
    measured_overhead: float | None = None
    reserved_bytes: int | None = None


@dataclass(frozen=True)
class Report:
    """All that `remat run` found out; `unchecked` says why a plan for this machine was not run."""

    graph: TrainingGraph
    result: Result
    rows: tuple[Row, ...]
    seconds: dict[str, float]
    simulation: Simulation | None = None
    check: Check | None = None
    recipe: Recipe | None = None
    unchecked: str = ""

    @property
    def failures(self) -> list[str]:
        """What a passed check would not say; empty where all is well."""
        return failures(self.check, self.result.budget_bytes) if self.check else []


def trace_loaded(
    loaded: Loaded,
    optimizer: Optimizer,
    accumulate: bool,
    device: str = CPU,
    sharding: Sharding = NO_SHARDING,
) -> Trace:
    """The unpriced trace of what a factory made."""
    from remat.graph_capture.tracing.trace import trace

    return trace(
        loaded.model, loaded.args, loaded.kwargs, loss_fn=loaded.loss_fn, target=loaded.target,
        optimizer=optimizer, accumulate=accumulate, device=device, sharding=sharding,
    )  # fmt: skip


def price_trace(
    traced: Trace,
    stages: Stopwatch,
    profile: Profile | None = None,
    sharding: Sharding = NO_SHARDING,
) -> TrainingGraph:
    """The priced graph of a trace, on one rank where it is sharded."""
    from remat.graph_capture.capturing import price_for

    recipe = traced.recipe
    doing = f"modelling ops on {recipe.device}" if recipe.is_modelled else "measuring ops"
    with stages.stage("profile", doing) as progress:
        graph = price_for(traced, progress=progress, profile=profile)
    return on_one_rank(graph, sharding)


def measure_loaded(loaded: Loaded, stages: Stopwatch, device: str = CPU) -> Profile:
    """The measured ops of what a factory made."""
    from remat.graph_capture.prices.profiling import measure

    with stages.stage("capture", "tracing the training step"):
        traced = trace_loaded(loaded, "none", accumulate=False, device=device)
    with stages.stage("profile", "measuring ops") as progress:
        return measure(traced, progress=progress)


def solve_request(graph: TrainingGraph, request: Request, stages: Stopwatch) -> Result:
    """Solve for the request's budget."""
    name, limit_s = request.solver, request.time_limit_s
    with stages.stage("solve", f"solving for {request.budget}") as progress:

        def listen(state: solvers.Progress) -> None:
            progress(text=solver_text(request.budget, state))

        asked: dict[str, Any] = {
            "solver": name, "time_limit_s": limit_s, "order": request.order,
            "keep": request.keep, "recompute": request.recompute,
        }  # fmt: skip
        if parse_budget(request.budget).kind == "min":
            return least_peak(graph, progress=listen, **asked)
        budget_bytes = resolve_budget(graph, request.budget)
        return solvers.solve(graph, budget_bytes, progress=listen, **asked)


def solver_text(budget: str, state: solvers.Progress) -> str:
    """What is shown while it solves: best schedule, bound and gap, and what comes next."""
    best = "none" if state.best_overhead is None else percent_text(state.best_overhead)
    bound = percent_text(state.bound_overhead)
    gap = "open" if state.gap is None else percent_text(state.gap)
    return f"solving for {budget}: best {best}, bound {bound}, gap {gap}, {state.doing}"


def check_schedule(
    loaded: Loaded,
    traced: Trace,
    schedule: Schedule,
    optimizer: Optimizer = "none",
    accumulate: bool = False,
) -> Check:
    """Rewrite the model to `schedule` and compare it with eager."""
    from remat.rewriter.checking.check import check
    from remat.rewriter.rewriting import rewrite

    module = rewrite(loaded.model, schedule, trace=traced)
    return check(
        loaded.model, module, loaded.args, loaded.kwargs,
        loss_fn=loaded.loss_fn, target=loaded.target, optimizer=optimizer, accumulate=accumulate,
    )  # fmt: skip


def run(loaded: Loaded, request: Request, stages: Stopwatch) -> Report:
    """Capture, price, solve, rewrite and check.

    Stops after solving where nothing fits, where the device or the ranks are not here, and, unless
    the check is asked for, where the unmodified step does not fit into free memory.
    """
    with stages.stage("capture", "tracing the training step"):
        traced = trace_loaded(
            loaded, request.optimizer, request.accumulate, request.device, request.sharding
        )
    graph = price_trace(traced, stages, request.profile, request.sharding)
    everything = unmodified(graph)
    chen = solvers.solve(graph, UNBOUNDED_BYTES, solver="chen_sqrt")
    result = solve_request(graph, request, stages)
    rows = (_row("unmodified", everything), _row("chen_sqrt", chen))
    if result.schedule is None:
        return Report(graph, result, rows, stages.seconds)
    simulation = simulate(graph, result.schedule)
    unchecked = why_unchecked(graph) if request.is_run_here and not request.check else ""
    if not request.is_run_here or unchecked:
        rows = (*rows, _row("this plan", result))
        return Report(
            graph, result, rows, stages.seconds, simulation,
            recipe=traced.recipe, unchecked=unchecked,
        )  # fmt: skip
    counted = request.optimizer, request.accumulate
    with stages.stage("check", "checking the plan against eager"):
        checked = check_schedule(loaded, traced, result.schedule, *counted)
    with stages.stage("compare", "measuring chen_sqrt"):
        compared = chen.schedule and check_schedule(loaded, traced, chen.schedule, *counted)
    rows = (
        _row("unmodified", everything, checked, baseline=True),
        _row("chen_sqrt", chen, compared),
        _row("this plan", result, checked),
    )
    return Report(graph, result, rows, stages.seconds, simulation, checked, traced.recipe)


def _row(name: str, result: Result, check: Check | None = None, *, baseline: bool = False) -> Row:
    row = Row(name, result.peak_bytes, result.time_us, result.overhead)
    if check is None:
        return row
    if baseline:
        measured = check.baseline_peak_bytes, check.baseline_step_us, 0.0
        reserved_bytes = check.baseline_reserved_bytes
    else:
        measured = check.plan_peak_bytes, check.plan_step_us, check.overhead
        reserved_bytes = check.plan_reserved_bytes
    return Row(
        name, result.peak_bytes, result.time_us, result.overhead, *measured, reserved_bytes
    )  # fmt: skip
