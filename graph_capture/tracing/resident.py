"""Bytes that live through the whole step, whatever the schedule: `Resident` of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import torch.utils._pytree as pytree
from torch import Tensor, nn

from remat.graph_capture.derived.sharding import NO_SHARDING, Sharding
from remat.graph_capture.devices.device_table import Allocated, allocated_on
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Optimizer, Resident
from remat.graph_capture.over_ranks.dtensors import local_part

STATES_PER_PARAMETER: dict[str, int] = {"none": 0, "sgd": 0, "momentum": 1, "adamw": 2}
"""Buffers as large as the parameter that an optimizer keeps."""
ADAMW_STEP_BYTES = 4
"""Of the step counter, one a parameter."""


def resident_bytes(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: Optimizer,
    accumulate: bool,
    allocated: Allocated = int,
    sharding: Sharding = NO_SHARDING,
) -> Resident:
    """Resident bytes of one rank, by category; a storage shared by two tensors counts once.

    Parameters
    ----------
    optimizer : whose state stays allocated between steps: ``momentum`` keeps one buffer
        a parameter, ``adamw`` two and a step counter of 4 bytes.
    accumulate : whether gradient buffers exist before the step, as they do when
        gradients of several batches are summed.
    allocated : how the device's allocator rounds.
    sharding : how much of parameters, gradients and state is here. DDP's buckets count as
        communication. What FSDP2 gathers is added by `derived/one_rank.py`.
    """
    if optimizer not in STATES_PER_PARAMETER:
        raise CaptureError(
            f"unknown optimizer {optimizer!r}: choose one of {', '.join(STATES_PER_PARAMETER)}"
        )
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    trained_bytes = sum(allocated(_own_bytes(p, sharding)) for p in trained)
    state_bytes = STATES_PER_PARAMETER[optimizer] * trained_bytes
    if optimizer == "adamw":
        state_bytes += allocated(ADAMW_STEP_BYTES) * len(trained)
    seen: set[int] = set()
    return Resident(
        parameters_bytes=(
            sum(allocated(_own_bytes(p, sharding)) for p in parameters)
            if sharding.kind == "fsdp2"
            else storage_bytes(parameters, seen, allocated)
        ),
        buffers_bytes=storage_bytes(model.buffers(), seen, allocated),
        batch_bytes=storage_bytes(pytree.tree_leaves(batch), seen, allocated),
        gradients_bytes=trained_bytes if accumulate else 0,
        optimizer_bytes=state_bytes,
        communication_bytes=trained_bytes if sharding.kind == "ddp" else 0,
    )


def resident_of_batch(resident: Resident, batch: Any, device: str) -> Resident:
    """`resident` with the bytes of another batch."""
    batch_bytes = storage_bytes(pytree.tree_leaves(batch), allocated=allocated_on(device))
    return msgspec.structs.replace(resident, batch_bytes=batch_bytes)


def _own_bytes(parameter: Tensor, sharding: Sharding) -> int:
    """Bytes of a parameter's part on one rank."""
    part = local_part(parameter)
    return sharding.shard_elements(part.shape) * part.element_size()


def storage_bytes(
    tensors: Iterable[Any], seen: set[int] | None = None, allocated: Allocated = int
) -> int:
    """Bytes of the storages of `tensors` on this rank, each counted once.

    Parameters
    ----------
    tensors : of a DTensor the local part counts; what is no tensor counts nothing.
    seen : storages that have been counted already. New ones are added.
    allocated : how the device's allocator rounds.
    """
    seen = set() if seen is None else seen
    total = 0
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        storage = local_part(tensor).untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += allocated(storage.nbytes())
    return total
