"""What the update of each parameter takes on this machine, for a plan of a whole step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from remat.graph_capture.optimizer_step.microbatch import Group, Microbatch
from remat.graph_capture.optimizer_step.update import MOMENTS, ParameterUpdate, Update

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from remat.graph_capture.graph import Optimizer as OptimizerName

BYTES_PER_US_IN_GB_S = 1e3


def parameter_updates(
    optimizer: Optimizer, kind: OptimizerName, parameters: Mapping[str, nn.Parameter], device: str
) -> dict[str, ParameterUpdate]:
    """By name, what the update of each parameter keeps and takes: measured on made data."""
    from remat.graph_capture.devices.device_table import allocated_on
    from remat.graph_capture.devices.here import meter_of
    from remat.graph_capture.gradients.optimizers import update_costs

    costs = update_costs(optimizer, parameters, meter_of(device), allocated_on(device))
    return {
        name: ParameterUpdate(
            MOMENTS[kind] * parameter.untyped_storage().nbytes(), costs[name].workspace_bytes
        )
        for name, parameter in parameters.items()
    }


def with_workspaces(microbatch: Microbatch, updates: Mapping[str, ParameterUpdate]) -> Microbatch:
    """The microbatch whose groups say what an update takes beside them."""

    def workspace_bytes(group: Group) -> int:
        found = (updates[name].workspace_bytes for name in group.gradient_of if name in updates)
        return max(found, default=0)

    groups = (
        msgspec.structs.replace(group, update_workspace_bytes=workspace_bytes(group))
        for group in microbatch.groups
    )
    return msgspec.structs.replace(microbatch, groups=tuple(groups))


def measured_update(
    optimizer: Optimizer, kind: OptimizerName, largest: nn.Parameter, device: str
) -> Update:
    """The update at the rate of memory at which one parameter goes through it here."""
    import torch
    from torch import nn

    from remat.graph_capture.devices.here import meter_of
    from remat.graph_capture.gradients.optimizers import parameter_groups, step_alone

    group = parameter_groups(optimizer)[id(largest)]
    options: dict[str, Any] = {name: value for name, value in group.items() if name != "params"}
    made = nn.Parameter(torch.zeros_like(largest))
    make: Any = type(optimizer)
    other: Optimizer = make([{**options, "params": [made]}])
    made.grad = torch.zeros_like(made)
    other.step()
    alone = Group("", made.numel(), made.nbytes, made.nbytes, made.element_size())
    unit = Update(kind, "parameter", 1.0, 1.0)
    moved_bytes = round(unit.device_us(alone) * BYTES_PER_US_IN_GB_S)
    took_us = meter_of(device).median_us(
        lambda: step_alone(other, made, other.param_groups[0]), moved_bytes
    )
    rate = moved_bytes / took_us / BYTES_PER_US_IN_GB_S
    return Update(kind, "parameter", rate, rate)
