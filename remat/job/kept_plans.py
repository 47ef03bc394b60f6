"""Plan files of the command line: plans and schedules, written and read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from remat.graph_capture.files.contents import read_contents
from remat.graph_capture.graph import TrainingGraph
from remat.job.factory import Loaded
from remat.schedules.judged_plan import judge_plan
from remat.schedules.plan import Plan, holds_steps, is_plan
from remat.schedules.schedule import Schedule
from remat.solved import graph_behind, predicted
from remat.solver.result import Result

if TYPE_CHECKING:
    from remat.graph_capture.tracing.recipe import Recipe

PLAN_FILES = ".json", ".pt2"


def plan_of_result(
    loaded: Loaded, recipe: Recipe, graph: TrainingGraph, result: Result
) -> Plan | None:
    """The plan of a solve, with its graph; None where nothing fits."""
    if result.schedule is None:
        return None
    from remat.rewriter.plans.making import make_plan

    prediction = predicted(result, graph.prices)
    priced = graph_behind(graph, result.schedule)
    return make_plan(loaded.model, recipe, result.schedule, prediction, priced)


def write_plan(plan: Plan, path: Path) -> None:
    """Keep a plan as JSON, or in an archive where the name ends so."""
    from remat.rewriter.plans.archive import save_plan

    save_plan(plan, path)


def read_kept(path: Path) -> Plan | Schedule:
    """A plan, as `run -o` keeps it, or a schedule alone, as `solve -o` does.

    Raises
    ------
    PlanError, ScheduleError : the file is neither. FileError : it cannot be read.
    """
    if path.suffix == ".pt2":
        from remat.rewriter.plans.archive import read_plan

        return read_plan(path)
    data = read_contents(path)
    name = str(path)
    return Plan.from_json(data, name) if is_plan(data) else Schedule.from_json(data, name)


def holds_plan(path: Path) -> bool:
    """Whether the file holds a plan or a schedule, and not a graph."""
    return path.suffix == ".pt2" or is_plan(data := read_contents(path)) or holds_steps(data)


def schedule_in(kept: Plan | Schedule) -> Schedule:
    """The schedule in what was kept."""
    return kept.schedule if isinstance(kept, Plan) else kept


def priced_in(kept: Plan | Schedule) -> TrainingGraph | None:
    """The graph of a plan, whose links say where it may copy values to; None of a schedule."""
    return kept.graph if isinstance(kept, Plan) else None


def fitting_schedule(kept: Plan | Schedule, loaded: Loaded, name: str) -> Schedule:
    """The schedule, of a plan that fits the model, its batch and this torch.

    Raises
    ------
    PlanError : the plan does not; names the first difference. Or it was edited.
    """
    if isinstance(kept, Plan):
        if kept.graph is not None:
            judge_plan(kept, name)
        from remat.rewriter.plans.fit import require_fit

        batch = (loaded.args, dict(loaded.kwargs or {}), loaded.target)
        require_fit(kept, loaded.model, batch, loaded.loss_fn)
    return schedule_in(kept)
