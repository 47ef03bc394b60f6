"""Whether a kept plan fits the torch, machine, model, batch and loss at hand.

What a person can name is compared first, the graph's hash last (in `loading`): a difference of
class, parameter or batch says more than one of ops.
"""

from __future__ import annotations

import warnings
from typing import Any

import msgspec
import torch
from torch import nn

from remat.graph_capture.devices.device_table import CPU, CUDA
from remat.graph_capture.errors import PlanError, for_caller
from remat.graph_capture.tracing.signature import Signature
from remat.graph_capture.tracing.step_module import LossFunction
from remat.rewriter.plans.facts import (
    loss_name,
    modules_in_eval,
    signature_from,
    state_of,
    title_of,
)
from remat.schedules.plan import Plan, StateFact

_IN_PYTHON = "remat.save_plan(remat.plan_of(remat.rematerialize(model, args, budget=...)), path)"


def require_fit(plan: Plan, model: nn.Module, batch: Any, loss_fn: LossFunction | None) -> None:
    """Raise `PlanError` with the first difference of torch, device, model, batch or loss.

    Parameters
    ----------
    batch : (args, kwargs, target), or None to let the first step compare it.
    """
    _require_torch(plan)
    _require_device(plan, model)
    _require_model(plan, model)
    if batch is not None:
        _require_batch(plan, batch)
    _require_loss(plan, loss_fn)


def _differs(what: str, planned: object, found: object) -> PlanError:
    return _does_not_fit(f"{what} was {planned} and is {found}")


def _does_not_fit(why: str) -> PlanError:
    how = for_caller(_IN_PYTHON, "remat run MODEL --budget BUDGET -o FILE")
    return PlanError(
        f"the plan does not fit: {why}. Make the plan again for what is at hand: {how}"
    )


def _require_torch(plan: Plan) -> None:
    """Builds for other devices are the same torch: ``2.13.0+cpu`` is ``2.13.0``."""
    planned, here = plan.versions.torch, str(torch.__version__)
    if planned.partition("+")[0] != here.partition("+")[0]:
        raise _differs("torch", planned, here)


def _require_device(plan: Plan, model: nn.Module) -> None:
    planned = plan.device if plan.device == CPU else CUDA
    here = next((p.device.type for p in model.parameters()), CPU)
    if here not in (planned, "meta"):
        raise _differs("the device", plan.device, here)
    title = title_of(here) if here in (CPU, CUDA) else plan.title
    if title != plan.title:
        warnings.warn(
            f"the plan was made for {plan.title} and is loaded on {title}: gradients stay the "
            "same, but workspaces may differ, and with them the peak, and so do times",
            stacklevel=4,
        )


def _require_model(plan: Plan, model: nn.Module) -> None:
    if plan.model != type(model).__name__:
        raise _differs("the model's class", plan.model, type(model).__name__)
    found = state_of(model)
    for mine, theirs in zip(plan.state, found, strict=False):
        _require_same(mine, theirs)
    if len(plan.state) != len(found):
        longer = plan.state if len(plan.state) > len(found) else found
        extra = longer[min(len(plan.state), len(found))]
        here = "is not there" if longer is plan.state else "is new"
        raise _does_not_fit(f"{extra.kind} {extra.name} {here}")
    in_eval = modules_in_eval(model)
    for path in (*plan.in_eval, *in_eval):
        if (path in plan.in_eval) != (path in in_eval):
            modes = ("eval mode", "training mode")
            raise _differs(f"submodule {path}", *(modes if path in plan.in_eval else modes[::-1]))


def _require_same(planned: StateFact, found: StateFact) -> None:
    if planned.name != found.name:
        raise _differs("a parameter or buffer", planned.name, found.name)
    for field in msgspec.structs.fields(StateFact):
        mine, theirs = getattr(planned, field.name), getattr(found, field.name)
        if mine != theirs:
            texts = (_fact_text(field.name, mine), _fact_text(field.name, theirs))
            raise _differs(f"{planned.kind} {planned.name}", *texts)


def _fact_text(field: str, value: Any) -> str:
    if field == "trained":
        return "trained" if value else "frozen"
    if field == "tied_to":
        return f"tied to {value}" if value else "tied to none"
    return f"of {field} {list(value) if isinstance(value, tuple) else value}"


def _require_batch(plan: Plan, batch: Any) -> None:
    planned, found = signature_from(plan.batch), Signature(batch)
    if planned.spec != found.spec:
        texts = (f"({', '.join(one.names)})" for one in (planned, found))
        raise _differs("the structure of the batch", *texts)
    for mine, theirs in zip(planned.lines(), found.lines(), strict=True):
        if mine != theirs:
            raise _differs("the batch", mine, theirs)


def _require_loss(plan: Plan, loss_fn: LossFunction | None) -> None:
    given = loss_name(loss_fn)
    if plan.loss_fn and not given:
        raise PlanError(
            f"the plan's step ends in the loss function {plan.loss_fn}, and no file holds a "
            f"function: pass it, remat.load(plan, model, loss_fn={plan.loss_fn})"
        )
    if plan.loss_fn != given:
        raise _differs("the loss function", plan.loss_fn or "none", given)
