"""Plans of the models of `tests.models`, and their steps rewritten to follow them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import remat
from remat import solver
from remat.graph_capture import TrainingGraph, measure_costs, trace
from remat.rewriter.rewriting import rewrite
from remat.rewriter.user_module.module import RematModule
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from tests.models import make

FORMED_OUTSIDE = {"nested_outputs_returned"}
"""Models whose outputs are views: gradients of these are formed outside the captured step."""
RNG_SLACK_BYTES = 3 * torch.get_rng_state().nbytes
"""A saved random state is counted for every op that may draw again."""


def schedule_of(graph: TrainingGraph, kind: str) -> Schedule:
    """By the solver `kind`; of `cut` at 60 % of what the kept step allocates, or all it needs."""
    if kind == "cut":
        everything = simulate(graph, schedule_of(graph, "store_all")).peak_bytes
        resident = graph.resident.total_bytes
        result = solver.solve_within(graph, resident + int(0.6 * (everything - resident)), "cut")
        if result.schedule is None:
            result = solver.solve_within(graph, result.least_feasible_bytes, "cut")
        assert result.schedule is not None
        return result.schedule
    return solver.make_solver(kind).schedule(graph)


def rewritten(name: str, kind: str = "cut") -> tuple[nn.Module, RematModule, tuple[Any, ...]]:
    """The model of that name, its rewritten module and its batch."""
    model, args, kwargs, loss_fn, target = make(name)
    traced = trace(model, args, kwargs, loss_fn=loss_fn, target=target)
    return model, rewrite(model, schedule_of(measure_costs(traced), kind), trace=traced), args


def schedules_of(fast: nn.Module) -> list[Any]:
    """Schedules of the plans that a module follows; of a range of sizes, its family."""
    return [plan.family or plan.schedule for plan in remat.plans(fast)]
