"""From a kept plan to a module that trains, in a process that solves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remat.graph_capture.devices.placement import resolved_device
from remat.graph_capture.errors import PlanError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.refuse import refuse_module
from remat.graph_capture.shapes.signature import RangedSignature
from remat.graph_capture.tracing.recipe import Recipe
from remat.graph_capture.tracing.step_module import LossFunction
from remat.rewriter.graphs.in_pieces import trace_in_pieces
from remat.rewriter.plans.archive import read_plan
from remat.rewriter.plans.facts import (
    autocast_of,
    batch_signature,
    loss_name,
    modules_in_eval,
    recipe_from,
    state_of,
    title_of,
    under_autocast,
)
from remat.rewriter.plans.fit import require_fit
from remat.rewriter.rewriting import refuse_rewritten, rewrite
from remat.rewriter.user_module.module import RematModule
from remat.rewriter.user_module.shared_state import SharedState
from remat.schedules.judged_plan import judge_plan
from remat.schedules.plan import Plan, Prediction, Versions
from remat.schedules.schedule import Schedule


def plan_of(module: nn.Module) -> Plan:
    """The plan that a rewritten module follows, to be kept with `save_plan`.

    For a cache of plans, it is the one that was used last.

    Raises
    ------
    PlanError : the module follows no plan, or its batch holds what a file cannot.
    """
    kind = type(module)._remat_last_used() if isinstance(module, SharedState) else None
    if kind is None or not issubclass(kind, RematModule):
        raise PlanError(
            f"a {type(module).__name__} follows no plan: pass what remat.rematerialize, "
            "remat.rewrite, remat.load or remat.plan_cache returned"
        )
    if isinstance(kind._remat_guards.recipe.signature, RangedSignature):
        raise PlanError(
            f"this {type(module).__name__} is planned for a range of sizes, which no plan file "
            "holds: keep graph.to_json() and the schedule, or plan for one size"
        )
    known = (kind._remat_prediction, kind._remat_priced)
    return make_plan(
        kind._remat_original_module, kind._remat_guards.recipe, kind._remat_schedule, *known
    )


def make_plan(
    model: nn.Module,
    recipe: Recipe,
    schedule: Schedule,
    prediction: Prediction | None = None,
    priced: TrainingGraph | None = None,
) -> Plan:
    """The plan of a schedule for a model as it was traced, with the graph it was made for."""
    flags = recipe.flags or (False, False)
    return Plan(
        model=recipe.name,
        state=state_of(model),
        in_eval=modules_in_eval(model),
        batch=batch_signature(recipe.signature),
        loss_fn=loss_name(recipe.loss_fn),
        autocast=autocast_of(recipe.autocast),
        told_compiling=flags[0],
        told_exporting=flags[1],
        resident=recipe.resident,
        device=recipe.device,
        title=title_of(recipe.device),
        versions=Versions(torch=str(torch.__version__), remat=version("remat")),
        schedule=schedule,
        prediction=prediction,
        graph=priced,
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
) -> RematModule:
    """Rewrite `model` to a kept plan. Nothing is measured and nothing is solved.

    Parameters
    ----------
    plan : a plan, or the file that it is kept in, JSON or ``.pt2``.
    model : of the class and shapes that the plan was made for, in training mode.
    args, kwargs, target : a batch to compare with the plan's now. Without one, the first step
        compares its batch.
    loss_fn : if the plan was made with a loss function, the one of that name.
    compile : as in `rewrite`.

    Raises
    ------
    PlanError : the file cannot be read, or was edited; or the torch, the device, the model, the
        batch or the loss differ from the plan's. The message names the first difference.
    ScheduleError : all these are the same, and yet the model computes something else, or the
        schedule breaks a rule of the step.
    """
    kept = plan if isinstance(plan, Plan) else read_plan(plan)
    if kept.graph is not None:
        judge_plan(kept, "the plan" if isinstance(plan, Plan) else str(plan))
    if kept.schedule.updates:
        raise PlanError(
            "the plan updates parameters during backward, and a file holds no optimizer: make it "
            "anew with remat.training_step(model, args, optimizer=...)"
        )
    refuse_rewritten(model)
    is_given = any(part is not None for part in (args, kwargs, target))
    batch = (tuple(args or ()), dict(kwargs or {}), target) if is_given else None
    require_fit(kept, model, batch, loss_fn)
    refuse_module(model, kept.device)
    with under_autocast(kept.autocast):
        recipe = recipe_from(kept, loss_fn, resolved_device(None, model))
        traced = trace_in_pieces(model, recipe, kept.schedule)
    # Without the graph behind them, figures are what somebody says.
    prediction = kept.prediction if kept.graph is not None else None
    known: dict[str, Any] = {"prediction": prediction, "priced": kept.graph}
    return rewrite(model, kept.schedule, trace=traced, compile=compile, **known)
