"""Backward as a training loop runs it: outside of the region of autocast in which forward ran."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch

_T: Any = torch


@contextlib.contextmanager
def outside_autocast(device: str) -> Generator[None]:
    """Leave all open regions of autocast for a while, though the caller is within them.

    A region that opens meanwhile is the outermost one, so that what it has cast goes when it ends,
    as in what a checkpoint runs again. `torch.autocast(enabled=False)` would be a region itself.
    """
    depth = _T.autocast_increment_nesting() - 1
    _T.autocast_decrement_nesting()
    before = torch.is_autocast_enabled(device)
    for _ in range(depth):
        _T.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before)
        for _ in range(depth):
            _T.autocast_increment_nesting()
