"""Every test on a CUDA device runs kernels that repeat their bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """Kernels that give the same bits at each run, where torch has them."""
    cudnn, before = torch.backends.cudnn, torch.backends.cudnn.deterministic
    was_exact = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    cudnn.deterministic = True
    yield
    cudnn.deterministic = before
    torch.use_deterministic_algorithms(was_exact)
