"""A whole optimizer step of several microbatches, planned and made ready to run on this CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from remat.budgets import parse_budget
from remat.graph_capture.errors import BudgetError, CaptureError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.links import Links, Tier
from remat.graph_capture.optimizer_step.microbatch import Group, Microbatch
from remat.graph_capture.optimizer_step.update import MOMENTS, ParameterUpdate, Update
from remat.levers.refused_updates import require_no_other_reader, require_own_storages
from remat.levers.step_request import StepRequest
from remat.levers.whole_step import StepPlan
from remat.schedules.as_planned import whole
from remat.solver.whole_step.layers import microbatch_of
from remat.solver.whole_step.op_by_op import StepOfOps, op_by_op
from remat.solver.whole_step.planned_step import StepTask
from remat.solver.whole_step.whole_step import plan_whole_step

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from remat.graph_capture.prices.profile import Profile
    from remat.graph_capture.tracing.one_trace import Trace
    from remat.rewriter.guards.forward import Guards
    from remat.rewriter.whole_step.results import JointResults
    from remat.rewriter.whole_step.step import WholeStep

BYTES_PER_US_IN_GB_S = 1e3


def step_here(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    request: StepRequest,
    optimizer: Optimizer,
    *,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    profile: Profile | None = None,
) -> WholeStep:
    """Capture one batch, plan a step of as many as asked for, and make it ready to run.

    Raises
    ------
    CaptureError, SolverError : the step cannot be run so; the message says why, and what can.
    BudgetError : no plan fits.
    """
    from remat.graph_capture.capturing import price_for, tiers_for
    from remat.graph_capture.tracing.trace import trace
    from remat.rewriter.guards.forward import Guards
    from remat.rewriter.whole_step.results import refuse_unusual, results_of

    tiers = tiers_for(model, request.device, request.host, request.nvme)
    traced = trace(
        model, args, kwargs, loss_fn=loss_fn, target=target, device=request.device, split="none"
    )
    refuse_unusual(traced)
    require_no_other_reader(traced, optimizer)
    results = results_of(traced.joint, traced.recipe.name)
    module = traced.joint.module
    guards = Guards(model, traced.recipe, traced.python_state, (), module, module)
    parameters = _parameters(guards, results)
    _require_in_optimizer(guards, results, parameters, optimizer)
    graph = whole(price_for(traced, profile=profile, tiers=tiers))
    task, updates = _task(graph, request, optimizer, parameters, results)
    plan = StepPlan(request, task, plan_whole_step(task, request.microbatches))
    if plan.shortage:
        raise BudgetError(plan.shortage)
    step = op_by_op(graph, task, plan.best, updates)
    if step.simulation.peak_bytes > task.budget_bytes:  # a bug: ops need no more than their layers
        raise BudgetError(
            f"the step of {task.microbatch.name} has a peak of {step.simulation.peak_bytes} bytes "
            f"op by op, above the budget of {task.budget_bytes}: give a little more"
        )
    return _ready(traced, guards, optimizer, results, step, parameters, task.links)


Parameters = dict[str, tuple[str, "nn.Parameter"]]
"""By its name in the graph, each parameter with the path that the user knows."""


def _parameters(guards: Guards, results: JointResults) -> Parameters:
    """All parameters of the step, each once."""
    from torch import nn

    live = guards.live.read()
    assert live is not None
    places = {place: name for name, place in results.place_of_input.items()}
    return {
        places[place]: (path, tensor)
        for place, (path, at) in enumerate(zip(guards.names, guards.taken, strict=True))
        if isinstance(tensor := live[at], nn.Parameter)
    }


def _require_in_optimizer(
    guards: Guards, results: JointResults, parameters: Parameters, optimizer: Optimizer
) -> None:
    """Refuse gradients that no update takes, and updates that keep more than is counted."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name in results.gradient_of:
        path, parameter = parameters.get(name, ("an input of the batch", None))
        if id(parameter) not in known:
            raise CaptureError(
                f"{path} of {guards.kind} gets a gradient and the optimizer does not have it, so "
                "a whole step would lose it: add it to the optimizer, or let it require no grad"
            )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise CaptureError(
            "amsgrad keeps a third number of each parameter, which is not planned: leave it out, "
            "or update during backward with remat.training_step without microbatches"
        )
    named = {path: parameter for path, parameter in parameters.values()}
    require_own_storages({**named, **dict(guards.model.named_buffers())})


def _task(
    graph: TrainingGraph,
    request: StepRequest,
    optimizer: Optimizer,
    parameters: Parameters,
    results: JointResults,
) -> tuple[StepTask, dict[str, ParameterUpdate]]:
    """What is to be planned, and what the update of each parameter takes."""
    from remat.graph_capture.devices.device_table import allocated_on
    from remat.graph_capture.devices.here import meter_of
    from remat.graph_capture.gradients.optimizers import update_costs

    assert graph.links is not None
    named = {path: parameters[name][1] for name in results.gradient_of
             for path in [parameters[name][0]]}  # fmt: skip
    costs = update_costs(optimizer, named, meter_of(request.device), allocated_on(request.device))
    updates = {
        name: ParameterUpdate(
            MOMENTS[request.optimizer] * parameters[name][1].untyped_storage().nbytes(),
            costs[parameters[name][0]].workspace_bytes,
        )
        for name in results.gradient_of
    }
    microbatch = _with_workspaces(microbatch_of(graph, results.gradient_of), updates)
    rate = _update_gb_s(optimizer, request, named)
    update = Update(request.optimizer, "parameter", rate, rate)
    budget_bytes = parse_budget(request.budget).bytes_for(graph)
    task = StepTask(
        microbatch, update, request.links(graph.links), budget_bytes, host_computes=False
    )
    return task, updates


def _with_workspaces(
    microbatch: Microbatch, updates: Mapping[str, ParameterUpdate]
) -> Microbatch:
    """The microbatch whose groups say what an update takes beside them."""
    groups = tuple(
        msgspec.structs.replace(
            group,
            update_workspace_bytes=max(
                (updates[name].workspace_bytes for name in group.gradient_of if name in updates),
                default=0,
            ),
        )
        for group in microbatch.groups
    )
    return msgspec.structs.replace(microbatch, groups=groups)


def _update_gb_s(
    optimizer: Optimizer, request: StepRequest, parameters: Mapping[str, nn.Parameter]
) -> float:
    """The rate of memory at which the largest parameter is updated, in 10^9 bytes a second."""
    import torch
    from torch import nn

    from remat.graph_capture.devices.here import meter_of
    from remat.graph_capture.gradients.optimizers import parameter_groups, step_alone

    largest = max(parameters.values(), key=lambda one: one.numel())
    group = parameter_groups(optimizer)[id(largest)]
    options: dict[str, Any] = {name: value for name, value in group.items() if name != "params"}
    made = nn.Parameter(torch.zeros_like(largest))
    kind: Any = type(optimizer)
    other: Optimizer = kind([{**options, "params": [made]}])
    made.grad = torch.zeros_like(made)
    other.step()
    unit = Update(request.optimizer, "parameter", 1.0, 1.0)
    alone = Group("", made.numel(), made.nbytes, made.nbytes, made.element_size())
    moved_bytes = round(unit.device_us(alone) * BYTES_PER_US_IN_GB_S)
    took_us = meter_of(request.device).median_us(
        lambda: step_alone(other, made, other.param_groups[0]), moved_bytes
    )
    return moved_bytes / took_us / BYTES_PER_US_IN_GB_S


def _ready(
    traced: Trace, guards: Guards, optimizer: Optimizer, results: JointResults, step: StepOfOps,
    parameters: Parameters, links: Links,
) -> WholeStep:  # fmt: skip
    """The step as an object that is called."""
    from remat.rewriter.whole_step.microbatch_code import codes_of
    from remat.rewriter.whole_step.program import actions_of
    from remat.rewriter.whole_step.residents import Residents
    from remat.rewriter.whole_step.running import StepCode
    from remat.rewriter.whole_step.step import StepFacts, WholeStep
    from remat.rewriter.tiers.file_tier import FileTier

    found = step.simulation
    tier = FileTier(found.host_peak_bytes, found.nvme_peak_bytes, links.nvme_path)
    tier.require_room()
    actions = actions_of(step.parts, step.graph, step.schedule)
    codes = codes_of(traced.joint, actions, results.place_of_gradient, tier)
    code = StepCode(
        actions, codes, results.place_of_gradient, results.loss_place, results.written,
        results.tangent,
    )  # fmt: skip
    homes: dict[str, Tier] = {v.name: v.home for v in step.graph.values if v.home is not None}
    held = {name: one for name, one in parameters.items() if name in homes}
    residents = Residents(optimizer, held, homes, tier.folders)
    trained = {parameters[name][0]: parameters[name][1] for name in results.gradient_of}
    facts = StepFacts(step.graph, step.schedule, found)
    return WholeStep(guards, optimizer, code, residents, facts, trained)
