"""`remat.whole_step.training_step`: a whole optimizer step of several batches, in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from remat.graph_capture.errors import BudgetError
from remat.progress import stopwatch_of_call
from remat.step_spec import StepSpec
from remat.whole_step.on_this_device import step_here
from remat.whole_step.step_planning import StepPlan, plan_step, step_request

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from remat.graph_capture.costs.cache import Profile
    from remat.whole_step.step import WholeStep


def training_step(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: Optimizer,
    budget: str | SupportsIndex,
    microbatches: int | None = None,
    host: str | SupportsIndex | None = None,
    nvme: str | None = None,
    device: str | None = None,
    loss_fn: Callable[..., Any] | None = None,
    target: Any = None,
    profile: Profile | str | Path | None = None,
    verbose: bool = True,
) -> StepPlan | WholeStep:
    """One optimizer step of so many batches like this one, over the device, the host and NVMe.

    Parameters, gradients and the optimizer's state are on the device, the host or NVMe, as is best.

    Parameters
    ----------
    optimizer : of `torch.optim`: an `SGD`, `Adam` or `AdamW` over parameters of the model.
    budget : of the device, in bytes or ``auto``. microbatches : batches in one step.
    host, nvme : sizes as of `remat.capture`. device : left at None, where the model is.
    Others : as of `remat.rematerialize`.

    Returns
    -------
    WholeStep : on a CPU; called with that many batches, it takes one step of eager's.
    StepPlan : for a device of the table, where nothing is run; `repr` says what it takes.

    Raises
    ------
    CaptureError : the model or the optimizer cannot be updated so. BudgetError : nothing fits, or a
        size cannot be read; the message says what can be done instead.
    """
    given: dict[str, Any] = {"loss_fn": loss_fn, "target": target, "profile": profile}
    spec = StepSpec.of(
        {"model": model, "args": args, "kwargs": kwargs, "verbose": verbose, **given}
    )
    asked = step_request(
        spec.model, optimizer, budget=budget, microbatches=microbatches, device=device, host=host,
        nvme=nvme,
    )  # fmt: skip
    given["profile"] = spec.known_profile
    stages, name = stopwatch_of_call(verbose=verbose), type(spec.model).__name__
    with stages.stage("solve", f"planning a whole step of {name}") as shown:
        plan: StepPlan | WholeStep
        if asked.is_run:
            plan = step_here(spec.model, spec.args, kwargs, asked, optimizer, **given)
        else:
            plan = plan_step(
                spec.model, spec.args, kwargs, asked, told=lambda text: shown(text=text), **given
            )
    if isinstance(plan, StepPlan) and plan.shortage:
        raise BudgetError(plan.shortage)
    stages.say(f"remat: {plan!r}; {stages.elapsed_s:.1f} s")
    return plan
