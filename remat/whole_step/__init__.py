"""The whole optimizer step over device, host and NVMe: its graph, its plan, and what runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remat.whole_step.on_this_device import training_step

__all__ = ["training_step"]


def __getattr__(name: str) -> Any:
    # Late, so that the command line can import what is free of torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from remat.whole_step.on_this_device import training_step

    return training_step
