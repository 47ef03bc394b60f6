"""Settings of torch, other than autocast, that decide which ops a model runs."""

from __future__ import annotations

from typing import Any

import torch

Settings = tuple[Any, ...]

_NAMES = (
    "torch.backends.mkldnn.enabled",
    "torch.backends.cudnn.enabled",
    "torch.backends.cuda.flash_sdp_enabled()",
    "torch.backends.cuda.mem_efficient_sdp_enabled()",
    "torch.backends.cuda.math_sdp_enabled()",
    "torch.get_default_dtype()",
    "torch.are_deterministic_algorithms_enabled()",
    "torch.is_autocast_cache_enabled()",
)


def settings() -> Settings:
    """The values of the settings now, in the order of `_NAMES`."""
    return (
        torch._C._get_mkldnn_enabled(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch.get_default_dtype(),
        torch._C._get_deterministic_algorithms(),
        torch.is_autocast_cache_enabled(),
    )


def first_difference(before: Settings, now: Settings) -> tuple[str, Any, Any]:
    """The first setting that differs: its name and both values."""
    for name, was, found in zip(_NAMES, before, now, strict=True):
        if was != found:
            return name, was, found
    raise AssertionError("no setting differs")
