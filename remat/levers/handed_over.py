"""What updates during backward take: of an optimizer that is here, and of one by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

from remat.graph_capture.errors import CaptureError, option
from remat.levers.refused_updates import refuse_parts, require_own_storages

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from remat.graph_capture.gradients.hand_over import HandOver


def hand_over_of(
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
    refuse_parts(model)
    buffers = dict(with_loss(model, loss_fn).named_buffers())
    require_own_storages({**parameters, **buffers})
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
            f"updates during backward are those of an optimizer: name it, "
            f"{option('optimizer', 'sgd')}, momentum or adamw"
        )
    if is_in_table(device):
        names = _parameters(model, loss_fn)
        trained = [name for name, parameter in names.items() if parameter.requires_grad]
        return HandOver(is_added=accumulate, updates=tuple((name, 0) for name in trained))
    return hand_over_of(model, _made(optimizer, model.parameters()), loss_fn, accumulate)


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
