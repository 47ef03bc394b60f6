"""The public way from a schedule to a module that trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from remat.graph_capture import tracing
from remat.graph_capture.device_table import CPU
from remat.graph_capture.errors import RewriteError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.step import LossFunction
from remat.graph_capture.tracing import Recipe, Trace, recipe_for, trace_recipe
from remat.graph_capture.without_storage import has_storage
from remat.rewriter.compiled import compile_step
from remat.rewriter.module import RematModule, make_module
from remat.schedules.plan import Prediction
from remat.schedules.schedule import Schedule


def rewrite(
    model: nn.Module,
    schedule: Schedule,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    trace: Trace | None = None,
    prediction: Prediction | None = None,
    priced: TrainingGraph | None = None,
) -> RematModule:
    """Compile `schedule` into a module that trains as `model` does, within its budget.

    The result is a `torch.fx.GraphModule` and an instance of the model's class, with the
    same parameters, buffers and names. `model` itself stays as it is and stays usable.

    Parameters
    ----------
    args, kwargs, loss_fn, target : as given to `capture`. Not needed in the process that
        captured `model`; in another one they are what the model is traced on.
    trace : a trace of `model` at hand, to save tracing again.
    prediction, priced : what is known of the schedule, and the graph behind it, to be kept in the
        module's plan.

    Raises
    ------
    ScheduleError : the schedule was made for another model or batch.
    RewriteError : nothing is known of the batch the schedule was made for.
    CaptureError : the model has become one that cannot be captured.
    """
    refuse_rewritten(model)
    if not has_storage(model):
        raise RewriteError(
            f"this {type(model).__name__} is on the meta device and cannot train: build it with "
            "storage, and rewrite that one to the plan, with its batch"
        )
    if trace is None:
        traced = _trace_for(model, schedule, args, kwargs, loss_fn, target)
    else:
        is_usable = not trace.compiled and not trace.recipe.is_modelled
        traced = trace if is_usable else _traced_again(model, trace.recipe)
    step = compile_step(traced, schedule)
    return make_module(model, schedule, traced.recipe, step, prediction, priced)


def refuse_rewritten(model: nn.Module) -> None:
    """Raise `RewriteError` for a module that follows a plan already."""
    if isinstance(model, RematModule):
        raise RewriteError(
            "this module is rewritten already: rewrite the original (module.original_module)"
        )


def _trace_for(
    model: nn.Module,
    schedule: Schedule,
    args: tuple[Any, ...] | None,
    kwargs: Mapping[str, Any] | None,
    loss_fn: LossFunction | None,
    target: Any,
) -> Trace:
    if args is not None or kwargs is not None:
        return tracing.trace(model, args or (), kwargs, loss_fn=loss_fn, target=target)
    recipe = recipe_for(model, schedule.graph_hash)
    if recipe is None:
        raise RewriteError(
            f"this {type(model).__name__} was not captured in this process for this plan: pass "
            "the batch too, rewrite(model, schedule, args, kwargs, loss_fn=..., target=...)"
        )
    return _traced_again(model, recipe)


def _traced_again(model: nn.Module, recipe: Recipe) -> Trace:
    """A trace of the ops that run here, whatever device the recipe's plan is for."""
    device = CPU if recipe.is_modelled else recipe.device
    return trace_recipe(model, dataclasses.replace(recipe, device=device))
