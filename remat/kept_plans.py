"""Plan files of the command line: plans and schedules, written and read."""

from __future__ import annotations

from pathlib import Path

from remat.api import predicted
from remat.cli_session import Session
from remat.factory import Loaded
from remat.pipeline import Report
from remat.schedules.plan import Plan, is_plan
from remat.schedules.schedule import Schedule

PLAN_FILES = ".json", ".pt2"


def keep_plan(session: Session, path: Path | None, loaded: Loaded, report: Report) -> None:
    """Write the plan of a run and say so; nothing where no path is given or nothing fits."""
    result, recipe = report.result, report.recipe
    if path is None or result.schedule is None or recipe is None:
        return
    from remat.rewriter.loading import make_plan
    from remat.rewriter.plan_archive import save_plan

    predictions = predicted(result, report.graph.prices)
    save_plan(make_plan(loaded.model, recipe, result.schedule, predictions), path)
    session.err.print(f"plan written to {path}", markup=False, soft_wrap=True)


def read_kept(path: Path) -> Plan | Schedule:
    """A plan, as `run -o` keeps it, or a schedule alone, as `solve -o` does.

    Raises
    ------
    PlanError, ScheduleError : the file is neither.
    """
    if path.suffix == ".pt2":
        from remat.rewriter.plan_archive import read_plan

        return read_plan(path)
    data = path.read_bytes()
    return Plan.from_json(data, str(path)) if is_plan(data) else Schedule.from_json(data)


def holds_plan(path: Path) -> bool:
    """Whether the file holds a plan or a schedule, and not a graph."""
    return path.suffix == ".pt2" or is_plan(data := path.read_bytes()) or b'"steps":' in data


def schedule_of(kept: Plan | Schedule) -> Schedule:
    """The schedule in what was kept."""
    return kept.schedule if isinstance(kept, Plan) else kept


def fitting_schedule(kept: Plan | Schedule, loaded: Loaded) -> Schedule:
    """The schedule, of a plan that fits the model, its batch and this torch.

    Raises
    ------
    PlanError : the plan does not; names the first difference.
    """
    if isinstance(kept, Plan):
        from remat.rewriter.plan_fit import require_fit

        batch = (loaded.args, dict(loaded.kwargs or {}), loaded.target)
        require_fit(kept, loaded.model, batch, loaded.loss_fn)
    return schedule_of(kept)
