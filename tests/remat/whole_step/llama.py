"""A small Llama, captured for a device of the table."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
from torch import nn

from remat.graph_capture.capture_api import capture
from remat.graph_capture.graph import TrainingGraph
from tests.paths import ROOT

SIZES = {
    "LAYERS": 3, "WIDTH": 64, "HEADS": 4, "KV_HEADS": 2, "HIDDEN": 128, "SEQ": 32, "VOCAB": 96,
}  # fmt: skip


def small_llama(**sizes: int) -> dict[str, Any]:
    """The model of the example, its batch and its loss; `sizes` beside `SIZES`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (SIZES | sizes).items():
            patch.setenv(f"LLAMA_{name}", str(value))
        return runpy.run_path(str(ROOT / "examples" / "llama.py"))["factory"]()


def captured(model: nn.Module, args: tuple[Any, ...], loss_fn: Any, target: Any) -> TrainingGraph:
    """The graph of one batch."""
    return capture(
        model, args, loss_fn=loss_fn, target=target, device="rtx4090", split="none", host="1GiB"
    )
