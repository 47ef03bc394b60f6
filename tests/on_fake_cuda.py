"""Runs a module as if there were a CUDA device: `python -m tests.on_fake_cuda MODULE ARGUMENT...`.

What runs, runs on the CPU, and its figures mean nothing. So copies are small.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import pytest
import torch

from remat.graph_capture.devices import cuda
from tests.fake_cuda import FakeCuda, install

SIZES = tuple(1 << shift for shift in (12, 14, 16, 18, 20))
"""In place of `cuda.SIZES`: as many."""


def main() -> None:
    """Run the module under fakes."""
    sys.argv = sys.argv[1:]
    with pytest.MonkeyPatch.context() as patch:
        install(FakeCuda(), patch)
        empty = torch.empty

        def unpinned(*given: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
            return empty(*given, **how)

        # Only memory beside a device can be pinned.
        patch.setattr(torch, "empty", unpinned)
        assert len(SIZES) == len(cuda.SIZES)
        patch.setattr(cuda, "SIZES", SIZES)
        runpy.run_module(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
