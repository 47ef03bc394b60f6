"""`remat.training_step`: backward updates each parameter as soon as its gradient is there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from remat.budgets import parse_budget
from remat.checks import Batch, is_checked, require_equal
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.levers.optimizer_in_backward import (
    optimizer_in_backward_of,
    refuse_clipping,
    refuse_scaling,
    require_no_other_reader,
)
from remat.one_call import solve
from remat.progress import solver_shown, stopwatch_of_call
from remat.solved import Solved, facts_of, infeasible_text, planned_text
from remat.solver.reductions.pin_globs import Globs
from remat.solver.result import Result
from remat.whole_step.on_this_device import step_here
from remat.whole_step.step_planning import StepPlan, plan_step, step_request

if TYPE_CHECKING:
    from torch import fx, nn
    from torch.optim import Optimizer

    from remat.graph_capture.costs.profile import Profile
    from remat.graph_capture.tracing.recipe import Split
    from remat.graph_capture.tracing.trace import Trace
    from remat.whole_step.step import WholeStep


@overload
def training_step(
    model: nn.Module,
    args: tuple[Any, ...] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    optimizer: Optimizer,
    budget: str | SupportsIndex,
    microbatches: int,
    device: str,
    host: str | SupportsIndex,
    nvme: str | None = ...,
    loss_fn: Callable[..., Any] | None = ...,
    target: Any = ...,
    profile: Profile | str | Path | None = ...,
) -> StepPlan | WholeStep: ...
@overload
def training_step(
    model: nn.Module,
    args: tuple[Any, ...] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    optimizer: Optimizer,
    budget: str | SupportsIndex,
    microbatches: int,
    device: None = ...,
    host: str | SupportsIndex,
    nvme: str | None = ...,
    loss_fn: Callable[..., Any] | None = ...,
    target: Any = ...,
    profile: Profile | str | Path | None = ...,
) -> WholeStep: ...
@overload
def training_step(
    model: nn.Module,
    args: tuple[Any, ...] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    optimizer: Optimizer,
    budget: str | SupportsIndex,
    loss_fn: Callable[..., Any] | None = ...,
    target: Any = ...,
    accumulate: bool = ...,
    max_grad_norm: float | None = ...,
    profile: Profile | str | Path | None = ...,
    solver: str = ...,
    time_limit_s: float = ...,
    keep: Globs = ...,
    recompute: Globs = ...,
    check: bool | None = ...,
    audit: bool = ...,
    verbose: bool = ...,
    split: Split | None = ...,
    microbatches: None = ...,
    device: None = ...,
    host: None = ...,
    nvme: None = ...,
    **options: Any,
) -> fx.GraphModule: ...
def training_step(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: Optimizer,
    budget: str | SupportsIndex,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    accumulate: bool = False,
    max_grad_norm: float | None = None,
    profile: Profile | str | Path | None = None,
    solver: str = "auto",
    time_limit_s: float = 60.0,
    keep: Globs = (),
    recompute: Globs = (),
    check: bool | None = None,
    audit: bool = True,
    verbose: bool = True,
    split: Split | None = None,
    microbatches: int | None = None,
    device: str | None = None,
    host: str | SupportsIndex | None = None,
    nvme: str | None = None,
    **options: Any,
) -> fx.GraphModule | StepPlan | WholeStep:
    """A module that trains as `model` does, and updates parameters during backward.

    ``backward()`` takes the optimizer's step for each parameter as soon as its gradient is there
    and no op of the plan reads the parameter any more. Then it lets go of the gradient. So a step
    has room for a few gradients and not for all, and parameters and the optimizer's state are
    those of eager to the bit. A loop stays as it is: ``optimizer.step()`` finds no gradients, and
    schedules of the learning rate count it.

    The idea is that of Lv et al. 2023, "Full parameter fine-tuning for large language models with
    limited resources" (https://arxiv.org/abs/2306.09782). The rule for what is computed again is
    ours.

    Parameters
    ----------
    optimizer : of `torch.optim`: an `SGD`, `Adam` or `AdamW`, single-tensor, foreach or fused,
        over parameters of the model. Its groups are read at each step. Parameters that it does not
        have keep their gradients.
    budget : as of `remat.solve`, on the peak of the whole step, the optimizer's state and what its
        update takes included.
    accumulate : whether gradients of several batches are summed first, see `remat.accumulating`.
        They then stay between the batches.
    max_grad_norm : refused: it says why.
    check : as of `remat.rematerialize`, of outputs and gradients. Parameters stay as they are, so
        that the peak is not compared.
    audit : as of `remat.rematerialize`. Of a whole optimizer step no forward is audited.
    verbose : as of `remat.rematerialize`.
    microbatches, device, host, nvme : with these, plan a whole optimizer step of so many batches
        like this one. Parameters, gradients and the optimizer's state are on the device, the host
        or NVMe, as is best; sizes are as of `remat.capture`. On a CPU, the result is a `WholeStep`
        (`remat/whole_step/step.py`): called with that many batches, it takes one step of
        eager's. On a device of the table nothing is run, and the result is a `StepPlan`; `repr`
        says what it takes.

    The other arguments are those of `remat.rematerialize`.

    Raises
    ------
    CaptureError : the model or the optimizer cannot be updated so; the message says what can.
    BudgetError : no schedule fits; the message names the least budget that is known to fit.
    RewriteError : the check found a difference.
    """
    from remat.graph_capture.costs.op_costs import measure_costs
    from remat.graph_capture.costs.profile import as_profile
    from remat.graph_capture.tracing.recipe import check_arguments
    from remat.graph_capture.tracing.trace import trace
    from remat.levers.by_tolerance import naming_tolerance
    from remat.ranges.ranged_call import require_options
    from remat.ranks.same_order import ONE_RANK, require_group
    from remat.rewriter.graphs.updating import Updates
    from remat.rewriter.rewriting import rewrite
    from remat.rewriter.user_module.module import original_of

    check_arguments(args, kwargs, loss_fn, target)
    require_options(
        {
            "loss_fn": loss_fn, "accumulate": accumulate, "profile": profile, "keep": keep,
            "recompute": recompute, "time_limit_s": time_limit_s, "check": check, "audit": audit,
            "split": split, "verbose": verbose,
        }
    )  # fmt: skip
    refuse_clipping(max_grad_norm)
    refuse_scaling()
    model = original_of(model)
    known = as_profile(profile)
    stages, name = stopwatch_of_call(verbose=verbose), type(model).__name__
    if microbatches is not None or host is not None or nvme is not None or device is not None:
        asked = step_request(
            model, optimizer, budget=budget, microbatches=microbatches, device=device, host=host,
            nvme=nvme,
        )  # fmt: skip
        batch_of: Any = {"loss_fn": loss_fn, "target": target, "profile": known}
        with stages.stage("solve", f"planning a whole step of {name}") as shown:
            if asked.is_run:
                plan = step_here(model, args, kwargs, asked, optimizer, **batch_of)
            else:
                plan = plan_step(
                    model, args, kwargs, asked, told=lambda text: shown(text=text), **batch_of
                )
        if isinstance(plan, StepPlan) and plan.shortage:
            raise BudgetError(plan.shortage)
        stages.say(f"remat: {plan!r}; {stages.elapsed_s:.1f} s")
        return plan
    gradient_release = optimizer_in_backward_of(model, optimizer, loss_fn, accumulate)
    with stages.stage("capture", f"tracing {name}"):
        traced: Trace = trace(
            model, args, kwargs, loss_fn=loss_fn, target=target, accumulate=accumulate,
            gradient_release=gradient_release, split=split,
        )  # fmt: skip
    require_no_other_reader(traced, optimizer)
    require_group(traced.joint.module, None, ONE_RANK.format(what="remat.training_step"))
    most_bytes = parse_budget(budget).most_bytes(traced.graph)
    pins: Any = {"keep": keep, "recompute": recompute}

    def costed(one: Trace) -> TrainingGraph:
        with stages.stage("profile", "timing ops") as shown:
            return measure_costs(one, progress=shown, profile=known, most_bytes=most_bytes)

    def solved(graph: TrainingGraph, budget: str | SupportsIndex) -> Result:
        with stages.stage("solve", f"solving for {budget}") as shown:
            told: Any = {"progress": solver_shown(shown, budget), **options}
            return solve(graph, budget, solver, time_limit_s, **pins, **told)

    graph = costed(traced)
    result = solved(graph, budget)
    if result.schedule is None:
        again = functools.partial(solved, budget=result.budget_bytes)
        lost = naming_tolerance(result, traced, graph, costed, again)
        raise BudgetError(infeasible_text(lost))
    updates = Updates(optimizer, type(model).__name__, accumulates=accumulate)
    known_of = facts_of(Solved(graph, result))
    module = rewrite(model, result.schedule, trace=traced, updates=updates, audit=audit, **known_of)
    checked = None
    if is_checked(graph, check):
        batch = Batch(args, kwargs, loss_fn, target, "none", accumulate)
        with stages.stage("check", f"comparing a step of {name} with eager"):
            checked = require_equal(model, module, batch, None)
    stages.say(planned_text(traced.recipe.title, result, checked, stages.elapsed_s))
    return module
