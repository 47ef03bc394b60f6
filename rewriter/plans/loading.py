"""From a kept plan to a module that trains, in a process that solves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from remat.graph_capture.devices.placement import resolved_device
from remat.graph_capture.errors import PlanError
from remat.graph_capture.refuse import refuse_module
from remat.graph_capture.shapes.signature import RangedSignature, refuse_beside_ranges
from remat.graph_capture.tracing.given import require_switches
from remat.graph_capture.tracing.step_module import LossFunction
from remat.rewriter.graphs.in_pieces import trace_in_pieces
from remat.rewriter.plans.archive import read_plan
from remat.rewriter.plans.facts import (
    recipe_from,
    under_autocast,
)
from remat.rewriter.plans.fit import require_fit
from remat.rewriter.plans.making import make_plan
from remat.rewriter.plans.over_range import load_over_range, plan_over_range
from remat.rewriter.rewriting import rewrite
from remat.rewriter.user_module.module import RematModule
from remat.rewriter.user_module.ranged import RangedModule
from remat.rewriter.user_module.shared_state import SharedState
from remat.schedules.judged_plan import judge_plan
from remat.schedules.plan import Plan


def plan_of(module: nn.Module) -> Plan:
    """The plan that a rewritten module follows, to be kept with `save_plan`.

    For a cache of plans, it is the one that was used last.

    Raises
    ------
    PlanError : the module follows no plan, or its batch holds what a file cannot.
    """
    kind = type(module)._remat_last_used() if isinstance(module, SharedState) else None
    if kind is not None and issubclass(kind, RangedModule):
        return plan_over_range(kind)
    if kind is None or not issubclass(kind, RematModule):
        raise PlanError(
            f"a {type(module).__name__} follows no plan: pass what remat.rematerialize, "
            "remat.rewrite, remat.load or remat.plan_cache returned"
        )
    if isinstance(kind._remat_guards.recipe.signature, RangedSignature):
        raise PlanError(
            f"this {type(module).__name__} runs one schedule over a range of sizes, which no plan "
            "file holds: keep a family of them, remat.rewrite(model, remat.solve(graph, budget))"
        )
    known = (kind._remat_prediction, kind._remat_priced)
    return make_plan(
        kind._remat_original_module, kind._remat_guards.recipe, kind._remat_schedule, *known
    )


def load(
    plan: Plan | str | Path,
    model: nn.Module,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    compile: bool = False,
    audit: bool = True,
) -> RematModule | RangedModule:
    """Rewrite `model` to a kept plan. Nothing is measured and nothing is solved.

    Parameters
    ----------
    plan : a plan, or the file that it is kept in, JSON or ``.pt2``.
    model : of the class and shapes that the plan was made for, in training mode.
    args, kwargs, target : a batch to compare with the plan's now. Without one, the first step
        compares its batch.
    loss_fn : if the plan was made with a loss function, the one of that name.
    compile, audit : as in `rewrite`.

    Raises
    ------
    PlanError : the file cannot be read, or was edited; or the torch, the device, the model, the
        batch or the loss differ from the plan's. The message names the first difference.
    ScheduleError : all these are the same, and yet the model computes something else, or the
        schedule breaks a rule of the step.
    """
    require_switches(compile=compile, audit=audit)
    kept = plan if isinstance(plan, Plan) else read_plan(plan)
    if kept.graph is not None:
        judge_plan(kept, "the plan" if isinstance(plan, Plan) else str(plan))
    if kept.schedule.updates:
        raise PlanError(
            "the plan updates parameters during backward, and a file holds no optimizer: make it "
            "anew with remat.training_step(model, args, optimizer=...)"
        )
    refuse_module(model, kept.device)
    is_given = any(part is not None for part in (args, kwargs, target))
    batch = (tuple(args or ()), dict(kwargs or {}), target) if is_given else None
    require_fit(kept, model, batch, loss_fn)
    if kept.over is not None:
        refuse_beside_ranges(compile=compile)
        return load_over_range(kept, kept.over, model, loss_fn, audit=audit)
    with under_autocast(kept.autocast):
        recipe = recipe_from(kept, loss_fn, resolved_device(None, model))
        traced = trace_in_pieces(model, recipe, kept.schedule)
    # Without the graph behind them, figures are what somebody says.
    prediction = kept.prediction if kept.graph is not None else None
    known: dict[str, Any] = {"prediction": prediction, "priced": kept.graph}
    return rewrite(model, kept.schedule, trace=traced, compile=compile, audit=audit, **known)
