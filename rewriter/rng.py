"""Saving the random stream where an op draws from it, and drawing the same again.

Plain functions as fx targets: the higher-order ops that torch has for this fail under
user dispatch modes. Both leave the stream as an eager step leaves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def save_rng_state() -> Tensor:
    """State of the CPU's default generator: uint8 of shape (5056,)."""
    return torch.get_rng_state()


def run_with_rng_state(state: Tensor, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `op` with the generator in `state`; put the generator back as it was."""
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        return op(*args, **kwargs)
    finally:
        torch.set_rng_state(now)
