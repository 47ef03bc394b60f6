"""Bytes that live through the whole step, whatever the schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch.utils._pytree as pytree
from torch import Tensor, nn

from remat.graph_capture.allocator import Allocated
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Resident

Optimizer = Literal["none", "sgd", "momentum", "adamw"]

STATES_PER_PARAMETER: dict[str, int] = {"none": 0, "sgd": 0, "momentum": 1, "adamw": 2}
ADAMW_STEP_BYTES = 4


def resident_bytes(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: Optimizer,
    accumulate: bool,
    allocated: Allocated = int,
) -> Resident:
    """Resident bytes by category; a storage shared by two tensors counts once.

    Parameters
    ----------
    optimizer : whose state stays allocated between steps: ``momentum`` keeps one buffer
        a parameter, ``adamw`` two and a step counter of 4 bytes.
    accumulate : whether gradient buffers exist before the step, as they do when
        gradients of several batches are summed.
    allocated : what the device's allocator takes for so many bytes.
    """
    if optimizer not in STATES_PER_PARAMETER:
        raise CaptureError(
            f"unknown optimizer {optimizer!r}: choose one of {', '.join(STATES_PER_PARAMETER)}"
        )
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    trained_bytes = sum(allocated(p.numel() * p.element_size()) for p in trained)
    state_bytes = STATES_PER_PARAMETER[optimizer] * trained_bytes
    if optimizer == "adamw":
        state_bytes += allocated(ADAMW_STEP_BYTES) * len(trained)
    seen: set[int] = set()
    return Resident(
        parameters_bytes=_storage_bytes(parameters, seen, allocated),
        buffers_bytes=_storage_bytes(model.buffers(), seen, allocated),
        batch_bytes=_storage_bytes(pytree.tree_leaves(batch), seen, allocated),
        gradients_bytes=trained_bytes if accumulate else 0,
        optimizer_bytes=state_bytes,
    )


def _storage_bytes(tensors: Iterable[Any], seen: set[int], allocated: Allocated) -> int:
    total = 0
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += allocated(storage.nbytes())
    return total
