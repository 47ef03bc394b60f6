"""Saving the random stream where an op draws from it, and drawing the same again.

These are plain functions as fx targets: the higher-order ops that torch has for this fail under
user dispatch modes. A step leaves the stream as an eager step leaves it. Each device has a stream
of its own. States are tensors on the host; that of a CUDA device has 16 bytes and counts for
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remat.graph_capture.devices.device_table import is_cuda


def save_rng_state(device: str = "cpu") -> Tensor:
    """State of the default generator of `device`: uint8, of shape (5056,) for the CPU."""
    return torch.cuda.get_rng_state(device) if is_cuda(device) else torch.get_rng_state()


def set_rng_state(state: Tensor, device: str = "cpu") -> None:
    """Put the default generator of `device` into `state`."""
    if is_cuda(device):
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def run_with_rng_state(
    state: Tensor, device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run `op` with the generator of `device` in `state`; put the generator back as it was.

    The first three have no names: `op` may have arguments of the same, as `aten.randn` has.
    """
    now = save_rng_state(device)
    set_rng_state(state, device)
    try:
        return op(*args, **kwargs)
    finally:
        set_rng_state(now, device)
