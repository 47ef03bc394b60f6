"""What a verb works on: a model, a kept graph, or a kept plan, which needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from remat.formats import percent_text
from remat.graph_capture.devices.known_devices import is_in_table
from remat.graph_capture.distributed.sharding import NO_SHARDING
from remat.graph_capture.errors import (
    BudgetError,
    DeviceError,
    FactoryError,
    PlanError,
    ProfileError,
    ScheduleError,
)
from remat.graph_capture.files import read_contents
from remat.graph_capture.graph import TrainingGraph
from remat.job import pipeline
from remat.job.factory import Loaded, load_model
from remat.job.request import NO_BUDGET, Request
from remat.progress import Stopwatch
from remat.schedules.derived import graph_of_schedule, within_split
from remat.schedules.outcome import Result
from remat.schedules.plan import (
    AGREEMENT,
    PlanFile,
    RangeFacts,
    evaluate_family,
    evaluate_plan,
    holds_steps,
    is_plan,
    require_within_budget,
)
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import overhead_of, simulate
from remat.solver.result import evaluate_schedule

if TYPE_CHECKING:
    from remat.graph_capture.tracing.recipe import Recipe


PLAN_FILES = ".json", ".pt2"


def read_kept(path: Path) -> PlanFile | Schedule:
    """A plan, as `run MODEL -o` keeps it, or a schedule alone, as `run GRAPH -o` does."""
    if path.suffix == ".pt2":
        from remat.rewriter.plans.loading import read_plan

        return read_plan(path)
    data = read_contents(path)
    name = str(path)
    return PlanFile.from_json(data, name) if is_plan(data) else Schedule.from_json(data, name)


def _holds_plan(path: Path) -> bool:
    # Graphs are kept as JSON alone.
    return path.suffix == ".pt2" or is_plan(data := read_contents(path)) or holds_steps(data)


def schedule_in(kept: PlanFile | Schedule) -> Schedule:
    return kept.schedule if isinstance(kept, PlanFile) else kept


def fitting_schedule(
    kept: PlanFile | Schedule, loaded: Loaded, name: str
) -> tuple[Schedule, TrainingGraph | None]:
    """The schedule of a plan that fits the model, its batch and this torch; else a `PlanError`.

    And the graph whose links say where it may copy values to; None of a schedule alone.
    """
    if not isinstance(kept, PlanFile):
        return kept, None
    if kept.graph is not None:  # judged before it is run: anyone can edit the file
        evaluate_plan(kept, name)
    from remat.rewriter.plans.facts import require_fit

    batch = (loaded.args, dict(loaded.kwargs or {}), loaded.target)
    require_fit(kept, loaded.model, batch, loaded.loss_fn)
    return kept.schedule, kept.graph


@dataclass(frozen=True)
class Captured:
    graph: TrainingGraph
    loaded: Loaded | None = None
    recipe: Recipe | None = None


@dataclass(frozen=True)
class PlanSource:
    """A graph, and the outcome of a solve on it or of a kept plan."""

    graph: TrainingGraph
    result: Result | None  # None where neither a plan nor a budget was given
    kept: PlanFile | Schedule | None = None  # of a file, judged by the simulator
    over: RangeFacts | None = None  # of a range of sizes; the others are then of the largest

    @property
    def schedule(self) -> Schedule | None:
        return self.result.schedule if self.result else None

    @property
    def solved(self) -> Result:
        if self.result is None:
            raise BudgetError(
                "name a plan (MODEL --plan plan.json, or just plan.json), or solve for a budget "
                "(MODEL --budget 8GiB)"
            )
        return self.result


def open_plan(
    source: str, request: Request, stopwatch: Stopwatch, plan: Path | None = None
) -> PlanSource:
    """Open a model, a kept graph or a kept plan; solve if there is a budget and no `plan`."""
    if source.endswith(PLAN_FILES) and _holds_plan(Path(source)):
        if plan is not None:
            raise PlanError(f"{source} and {plan} are both plans: name one, or a model and one")
        _refuse_budget(request)
        if request.host or request.nvme:
            raise BudgetError(
                f"leave out --host {request.host}, as a plan has its own links; to solve again, "
                "name its model"
            )
        opened = _opened_plan(read_kept(Path(source)), source, None)
        graph = within_split(opened.graph, request.split)
        if opened.schedule is not None:
            graph_of_schedule(graph, opened.schedule)  # refuses chunks that are not allowed
        return replace(opened, graph=graph)
    if plan is not None:
        _refuse_budget(request)
        kept = read_kept(plan)
        if not source.endswith(PLAN_FILES):
            request = _returning_as(kept, _splitting_as(schedule_in(kept), request))
        return _opened_plan(kept, str(plan), captured(source, request, stopwatch).graph)
    graph = captured(source, request, stopwatch).graph
    is_asked = request.budget != NO_BUDGET
    result = pipeline.solve_request(graph, request, stopwatch) if is_asked else None
    return PlanSource(graph, result)


def _splitting_as(schedule: Schedule, request: Request) -> Request:
    if not schedule.chunks or request.split is not None:  # another graph would refuse it
        return request
    is_exact = all(one.exact for one in schedule.chunks)
    return replace(request, split="exact" if is_exact else "tolerance")


def _returning_as(kept: PlanFile | Schedule | None, request: Request) -> Request:
    if not isinstance(kept, PlanFile):
        return request
    return replace(request, outputs=tuple(map(str, kept.outputs or ())))


def _refuse_budget(request: Request) -> None:
    if request.budget != NO_BUDGET:
        raise BudgetError(
            f"leave out --budget {request.budget}, as a plan has its own; to solve again, name "
            "the model or graph without the plan"
        )


def _opened_plan(kept: PlanFile | Schedule, name: str, graph: TrainingGraph | None) -> PlanSource:
    schedule, told_us = schedule_in(kept), 0.0
    over: RangeFacts | None = None
    if isinstance(kept, PlanFile) and (graph is None or kept.graph is not None):
        own, _ = evaluate_plan(kept, name)  # anyone can edit the file: only the simulator is taken
        if graph is None or own == graph:  # its bound is of its own costs, for no other graph
            graph, over = own, kept.over
            told_us = kept.prediction.lower_bound_us if kept.prediction else 0.0
        elif graph.links is None and own.links is not None:  # its copies need links, no more
            graph = msgspec.structs.replace(graph, links=own.links)
    if over is not None:
        evaluate_family(over, name)
    if graph is None:
        raise PlanError(
            f"name its graph or model too (GRAPH --plan {name}): {name} is only a schedule, "
            "without sizes and costs"
        )
    try:
        peak_bytes = simulate(graph, schedule).peak_bytes
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from error
    require_within_budget(schedule, peak_bytes, name)
    result = evaluate_schedule(  # no lower bound: a file proves nothing
        graph, schedule, budget_bytes=schedule.budget_bytes or peak_bytes,
        lower_bound_us=0.0, message=_unproved(graph, told_us, name),
    )  # fmt: skip
    return PlanSource(graph, result, kept, over)


def _unproved(graph: TrainingGraph, told_us: float, name: str) -> str:
    """What to say of a bound that a file states; empty for one that anybody can see."""
    if told_us <= graph.time_us * (1 + AGREEMENT):
        return ""
    told = percent_text(overhead_of(told_us, graph.time_us))
    return (
        f"to prove a bound, remat run {name} --budget BUDGET: {name} says that no schedule of its "
        f"budget has less than {told} overhead, but a file proves nothing, so until then figures "
        "are bounded by the step with every op once"
    )


def captured(source: str, request: Request, stopwatch: Stopwatch) -> Captured:
    if not source.endswith(PLAN_FILES):
        loaded, request = load_shown(source, stopwatch, request)
        return captured_model(loaded, request, stopwatch)
    if request.profile is not None:
        raise ProfileError(f"leave out --profile, or name a model: {source} has its own costs")
    if request.sharding != NO_SHARDING:
        raise DeviceError(f"leave out --sharding, or name a model: {source} is captured already")
    if _holds_plan(Path(source)):
        kept = read_kept(Path(source))
        if not isinstance(kept, PlanFile):
            raise PlanError(
                f"name its model, or a graph kept by show --as graph: {source} is only a schedule"
            )
        return Captured(_as_asked(evaluate_plan(kept, source)[0], request))
    graph = TrainingGraph.from_json(read_contents(source), source)
    return Captured(_as_asked(graph, request))


def _as_asked(graph: TrainingGraph, request: Request) -> TrainingGraph:
    graph = within_split(graph, request.split)
    if not (request.host or request.nvme):
        return graph
    # To ask what this machine is takes torch, which kept graphs do without.
    from remat.graph_capture.costs.measuring import is_of_here, relinked

    is_here = is_of_here(graph) and not is_in_table(graph.device)
    tiers = request.tiers(graph.device, is_here=is_here)
    return graph if tiers is None else relinked(graph, tiers)


def captured_model(loaded: Loaded, request: Request, stopwatch: Stopwatch) -> Captured:
    with stopwatch.stage("capture", "tracing the training step"):
        traced = pipeline.trace_loaded(loaded, request)
    return Captured(pipeline.graph_with_costs(traced, request, stopwatch), loaded, traced.recipe)


def require_model(source: str) -> None:
    if source.endswith(PLAN_FILES):
        raise FactoryError(f"name the model first, as path/to/file.py: {source} is a kept file")


def load_shown(
    model: str, stopwatch: Stopwatch, request: Request, kept: PlanFile | Schedule | None = None
) -> tuple[Loaded, Request]:
    """Load the model onto the device of the request; its second result names that device.

    And the results that the step of `kept` returns.
    """
    require_model(model)
    request = _returning_as(kept, request)
    with stopwatch.stage("load", f"loading {model}"):
        loaded, request = load_model(model), request.with_device()
        return loaded.on(request.device), request
