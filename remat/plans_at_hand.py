"""Plans that are at hand: in a file, of a module that follows them, of what torch.compile made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from remat.graph_capture.errors import PlanError
from remat.graph_capture.graph import TrainingGraph
from remat.plan import Plan
from remat.schedules.outcome import Check
from remat.schedules.plan import PlanFile, Prediction, evaluate_plan
from remat.schedules.schedule import Schedule

if TYPE_CHECKING:
    from torch import nn

    from remat.compile.graph_context import CompiledPlan


_FIGURES = ("peak_bytes", "time_us", "overhead", "lower_bound_us")
"""What a file says of its schedule, under the names that a plan has them by."""


def load(path: str | Path) -> Plan:
    """Read a plan that `Plan.save` or ``remat run -o`` kept; `Plan.apply` trains by it.

    Parameters
    ----------
    path : a JSON file, or a ``.pt2`` archive.

    Raises
    ------
    PlanError : the file is no plan, is cut short or was edited, or the archive holds none.
    RematError : the file cannot be read.
    """
    if not isinstance(path, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            "pass the file's path: a plan is read from a file, and this is "
            f"{type(path).__name__}. What a module follows is remat.plans(module)"
        )
    from remat.rewriter.plans.loading import read_plan

    file = read_plan(path)
    if file.graph is not None:
        evaluate_plan(file, str(path))
    return plan_of_file(file)


def plan_of_file(file: PlanFile) -> Plan:
    """The plan that a file keeps; with figures, where it keeps the graph behind them."""
    if file.over is not None:
        return Plan.from_family(file.over.family, file.over.graph, file)
    return _with_figures(file.schedule, file.prediction, file.graph, file.check, source=file)


def plans(model: Any = None) -> list[Plan]:
    """The plans that a module follows, the one that was used last at the end.

    Parameters
    ----------
    model : what `remat.rematerialize` or `Plan.apply` returned: one plan, one for each shape that
        came so far, or with `blocks` that of the whole step. None for the graphs that
        ``torch.compile(backend="remat")`` has compiled in this process, of which 64 are kept.

    Raises
    ------
    PlanError : the module follows no plan.
    """
    # What torch.compile returned holds what it compiled; its graphs are not told apart by model.
    if model is None or hasattr(model, "_orig_mod") or hasattr(model, "_torchdynamo_orig_callable"):
        from remat.compile.graph_context import compiled_plans

        return [_of_code(one) for one in compiled_plans()]
    from torch import nn

    from remat.blocks.rematerialized import planned_blocks
    from remat.caches.per_shape_plans import PlanCache, planned_modules

    if not isinstance(model, nn.Module):
        raise PlanError(
            "pass what remat.rematerialize or Plan.apply returned: a module follows plans, and "
            f"this is {type(model).__name__}"
        )
    if isinstance(model, PlanCache):
        return [_of_module(one) for one in planned_modules(model)]
    blocks = planned_blocks(model)
    return [Plan.from_result(blocks.result)] if blocks is not None else [_of_module(model)]


def _of_code(code: CompiledPlan) -> Plan:
    return Plan(
        status="feasible", solver="auto", budget_bytes=code.budget_bytes, schedule=code.schedule,
        peak_bytes=code.peak_bytes, overhead=code.overhead, wall_s=code.seconds, code=code,
    )  # fmt: skip


def _of_module(module: nn.Module) -> Plan:
    from remat.rewriter.plans.loading import followed  # not the file: a batch may not fit in one
    from remat.rewriter.user_module.ranged import RangedModule

    kind: Any = type(module)
    if not hasattr(kind, "modules_again"):  # in parts, the plan is of a coarse graph
        kind = followed(module)
    if issubclass(kind, RangedModule):
        return Plan.from_family(kind._remat_family, kind._remat_graph, module)
    known = (kind._remat_prediction, kind._remat_costed, kind._remat_check)
    return _with_figures(kind._remat_schedule, *known, source=module)


def _with_figures(
    schedule: Schedule, said: Prediction | None, graph: TrainingGraph | None,
    check: Check | None, source: Any,
) -> Plan:  # fmt: skip
    """The plan of a schedule, with what was predicted of it where that is known."""
    figures = {name: getattr(said, name) for name in _FIGURES if said is not None}
    status = "optimal" if said is not None and said.gap == 0 else "feasible"
    return Plan(
        status=(said and said.status) or status, solver=schedule.solver,
        budget_bytes=schedule.budget_bytes, schedule=schedule, step=graph, source=source,
        check=check, **figures,
    )  # fmt: skip
