"""An optimizer of torch's, asked for the step of one parameter: what it keeps, and what it takes.

The step is torch's own code, run with one group that holds the one parameter. Nothing of it is
written again here, so its bits are those of a step over all parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from remat.graph_capture.devices.known_devices import Allocated
from remat.graph_capture.devices.meter import Meter
from remat.graph_capture.errors import CaptureError

_KNOWN = (SGD, Adam, AdamW)
"""Their step of a parameter depends on its own gradient, state and group alone."""

_Alike = tuple[Any, ...]


@dataclass(frozen=True)
class _UpdateCost:
    """`state_bytes` are kept between steps, `workspace_bytes` taken beside the gradient in one."""

    state_bytes: int
    workspace_bytes: int


def require_known(optimizer: Optimizer) -> None:
    """Raises CaptureError where the step cannot be taken for each parameter by itself."""
    if type(optimizer) not in _KNOWN:
        names = ", ".join(kind.__name__ for kind in _KNOWN)
        raise CaptureError(
            f"a {type(optimizer).__name__} cannot update parameters one by one during backward: "
            f"that is known of torch's {names}. Use one of these, or update after backward"
        )
    given: Any = optimizer
    if given._optimizer_step_pre_hooks or given._optimizer_step_post_hooks:
        raise CaptureError(
            "the optimizer has hooks on its step, which would be called for each parameter: remove "
            "them, or update after backward"
        )
    if any(group.get("differentiable") or group.get("capturable") for group in given.param_groups):
        raise CaptureError(
            "an optimizer with differentiable=True or capturable=True is not updated during "
            "backward: leave it out, or update after backward"
        )


def parameter_groups(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """By the `id` of each parameter: its group, as schedules have left it."""
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}


def step_alone(optimizer: Optimizer, parameter: Tensor, group: Mapping[str, Any]) -> None:
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [parameter]}]
    try:
        # Not the instance's: a scheduler has put its own there, which counts steps.
        type(optimizer).step(optimizer)
    finally:
        optimizer.param_groups = groups


def update_costs(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    meter: Meter,
    allocated: Allocated,
) -> dict[str, _UpdateCost]:
    groups = parameter_groups(optimizer)
    keys = {
        name: (_same_update(p, groups[id(p)]), p, groups[id(p)])
        for name, p in parameters.items()
        if p.requires_grad and id(p) in groups
    }
    found: dict[_Alike, _UpdateCost] = {}
    for key, parameter, group in keys.values():
        if key not in found:
            # Models have many parameters alike, and each measurement runs two steps.
            found[key] = _cost_of(optimizer, parameter, group, meter, allocated)
    return {name: found[key] for name, (key, _, _) in keys.items()}


def _same_update(parameter: Tensor, group: Mapping[str, Any]) -> _Alike:
    given = (parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
    # Whether an option is zero decides which tensors a step makes, as of momentum.
    options = ((k, v) for k, v in group.items() if k != "params")
    return *given, *(
        (name, value if isinstance(value, bool | str | type(None)) else value != 0)
        for name, value in options
        if isinstance(value, bool | str | float | int | type(None))
    )


def _cost_of(
    optimizer: Optimizer,
    parameter: Tensor,
    group: Mapping[str, Any],
    meter: Meter,
    allocated: Allocated,
) -> _UpdateCost:
    made = nn.Parameter(torch.zeros_like(parameter))
    options = {name: value for name, value in group.items() if name != "params"}
    kind: Any = type(optimizer)
    other: Optimizer = kind([{**options, "params": [made]}])
    made.grad = torch.zeros_like(made)
    # The first step makes the state, so only the second takes what all later ones take.
    other.step()
    memory = meter.step_memory(lambda: step_alone(other, made, other.param_groups[0]))
    state: Iterable[Any] = other.state[made].values()
    state_bytes = sum(
        allocated(kept.nbytes)
        for kept in state
        if isinstance(kept, Tensor) and kept.device == parameter.device
    )
    return _UpdateCost(state_bytes, memory.peak_bytes)
