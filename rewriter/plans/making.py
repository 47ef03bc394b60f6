"""From a schedule and a recipe to a plan: what a file keeps."""

from __future__ import annotations

from importlib.metadata import version

import torch
from torch import nn

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.tracing.recipe import Recipe
from remat.rewriter.plans.facts import (
    autocast_of,
    batch_signature,
    loss_name,
    modules_in_eval,
    state_of,
    title_of,
)
from remat.schedules.plan import Plan, Prediction, Versions
from remat.schedules.schedule import Schedule


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
