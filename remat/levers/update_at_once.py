"""`remat.training_step`: backward updates each parameter as soon as its gradient is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from remat.checks import Batch, is_checked, require_equal
from remat.graph_capture.errors import BudgetError, CaptureError
from remat.infeasible import infeasible_text
from remat.one_call import solve
from remat.solved import Solved, facts_of
from remat.solver.pins.globs import Globs

if TYPE_CHECKING:
    from torch import Tensor, fx, nn
    from torch.optim import Optimizer

    from remat.graph_capture.gradients.hand_over import HandOver
    from remat.graph_capture.prices.profile import Profile
    from remat.graph_capture.tracing.one_trace import Trace
    from remat.graph_capture.tracing.recipe import Split


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
    split: Split | None = None,
    **options: Any,
) -> fx.GraphModule:
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

    The other arguments are those of `remat.rematerialize`.

    Raises
    ------
    CaptureError : the model or the optimizer cannot be updated so; the message says what can.
    BudgetError : no schedule fits; the message names the least budget that is known to fit.
    RewriteError : the check found a difference.
    """
    from remat.graph_capture.prices.pricing import price
    from remat.graph_capture.prices.profile import as_profile
    from remat.graph_capture.tracing.trace import trace
    from remat.rewriter.gradients.updating import Updates
    from remat.rewriter.rewriting import refuse_rewritten, rewrite

    _refuse_clipping(max_grad_norm)
    _refuse_scaling()
    refuse_rewritten(model)
    known, hand_over = as_profile(profile), _hand_over(model, optimizer, loss_fn, accumulate)
    traced: Trace = trace(
        model, args, kwargs, loss_fn=loss_fn, target=target, accumulate=accumulate,
        hand_over=hand_over, split=split,
    )  # fmt: skip
    _require_no_other_reader(traced, optimizer)
    graph = price(traced, profile=known)
    result = solve(
        graph, budget, solver, time_limit_s, keep=keep, recompute=recompute, **options
    )  # fmt: skip
    if result.schedule is None:
        raise BudgetError(infeasible_text(result))
    updates = Updates(optimizer, type(model).__name__, accumulates=accumulate)
    module = rewrite(
        model, result.schedule, trace=traced, updates=updates, **facts_of(Solved(graph, result))
    )
    if is_checked(graph, check):
        batch = Batch(args, kwargs, loss_fn, target, "none", accumulate)
        require_equal(model, module, batch, None)
    return module


def _refuse_clipping(max_grad_norm: float | None) -> None:
    if max_grad_norm is not None:
        raise CaptureError(
            "gradients cannot be clipped by their global norm where parameters are updated during "
            "backward: the norm is known when the last gradient is there, and by then the others "
            "have been used. Update after backward (remat.rematerialize), or leave out clipping"
        )


def _refuse_scaling() -> None:
    """Raise `CaptureError` under autocast to float16, which is trained with a `GradScaler`."""
    import torch

    from remat.graph_capture.tracing.recipe import autocast_state

    if any(on and dtype is torch.float16 for _, on, dtype in autocast_state()):
        raise CaptureError(
            "float16 autocast needs a GradScaler, which unscales all gradients when backward has "
            "ended, and parameters that are updated during backward would take scaled ones: use "
            "bfloat16, or update after backward (remat.rematerialize)"
        )


def _hand_over(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Any] | None,
    accumulate: bool,
) -> HandOver:
    """What the updates take, of the parameters that both the step and the optimizer have."""
    from remat.graph_capture.devices.device_table import allocated_on
    from remat.graph_capture.devices.here import meter_of
    from remat.graph_capture.devices.placement import resolved_device
    from remat.graph_capture.gradients.hand_over import HandOver
    from remat.graph_capture.gradients.optimizers import require_known, update_costs
    from remat.graph_capture.tracing.step_module import with_loss

    require_known(optimizer)
    device = resolved_device(None, model)
    parameters = _parameters(model, loss_fn)
    buffers = dict(with_loss(model, loss_fn).named_buffers())
    _require_own_storages({**parameters, **buffers})
    costs = update_costs(optimizer, parameters, meter_of(device), allocated_on(device))
    if not costs:
        raise CaptureError(
            f"the optimizer has no parameter of this {type(model).__name__}: make it of "
            "model.parameters()"
        )
    return HandOver(
        is_added=accumulate,
        updates=tuple((name, cost.workspace_bytes) for name, cost in costs.items()),
        state_bytes=sum(cost.state_bytes for cost in costs.values()),
    )


def planned_hand_over(
    model: nn.Module,
    optimizer: Literal["none", "sgd", "momentum", "adamw"],
    device: str,
    *,
    loss_fn: Callable[..., Any] | None = None,
    accumulate: bool = False,
) -> HandOver:
    """What updates take by an optimizer that is known by its name, to plan with.

    On a device of the table they are those of a fused optimizer, which takes nothing meanwhile.

    Raises
    ------
    CaptureError : there is no optimizer, or it cannot update this model so.
    """
    from remat.graph_capture.devices.device_table import is_in_table
    from remat.graph_capture.gradients.hand_over import HandOver

    if optimizer == "none":
        raise CaptureError(
            "updates during backward are those of an optimizer: name it, --optimizer sgd, momentum "
            "or adamw"
        )
    if is_in_table(device):
        names = _parameters(model, loss_fn)
        trained = [name for name, parameter in names.items() if parameter.requires_grad]
        return HandOver(is_added=accumulate, updates=tuple((name, 0) for name in trained))
    return _hand_over(model, _made(optimizer, model.parameters()), loss_fn, accumulate)


def _made(name: str, parameters: Iterable[Tensor]) -> Optimizer:
    from torch.optim import SGD, AdamW

    if name == "adamw":
        return AdamW(parameters)
    return SGD(parameters, momentum=0.9 if name == "momentum" else 0.0)


def _parameters(model: nn.Module, loss_fn: Callable[..., Any] | None) -> dict[str, nn.Parameter]:
    """The parameters of the step by the paths that users know."""
    from remat.graph_capture.joint.provenance import path_in_model
    from remat.graph_capture.tracing.step_module import with_loss

    step = with_loss(model, loss_fn)
    named = step.named_parameters()
    return {n if step is model else path_in_model(n): p for n, p in named}


def _require_own_storages(state: Mapping[str, Tensor]) -> None:
    """Raise `CaptureError` if an update of one parameter would change another, or a buffer."""
    names = {name: t.untyped_storage().data_ptr() for name, t in state.items() if t.numel()}
    shared = {address for address, number in Counter(names.values()).items() if number > 1}
    both = [name for name, address in names.items() if address in shared]
    if both:
        raise CaptureError(
            f"{both[0]} and {both[1]} are views of one tensor, so that an update of one "
            "changes the other: give each its own, or update after backward"
        )


def _require_no_other_reader(traced: Trace, optimizer: Optimizer) -> None:
    """Raise `CaptureError` if forward reads an updated parameter by a tensor that is none.

    The graph then does not know that a later read would find the new values.
    """
    from remat.rewriter.guards.forward import constants_of

    updated = {
        parameter.untyped_storage().data_ptr()
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for constant in constants_of(traced.joint.module):
        if constant.numel() and constant.untyped_storage().data_ptr() in updated:
            raise CaptureError(
                f"forward reads a parameter by another tensor of shape {list(constant.shape)}, "
                "such as an attribute that is its .data: read the parameter itself, or update "
                "after backward"
            )
