"""The examples, small, in an arena: no miss, hardly a page fault, and the same bits."""

from __future__ import annotations

import pytest

from benchmarks.arena import measured
from tests.limits import AMPLE_S
from tests.rewriter.arena.steps_in_arena import needs_compiler

SMALL = {
    "gpt": {"GPT_LAYERS": 1, "GPT_WIDTH": 64, "GPT_HEADS": 2, "GPT_SEQ": 128, "GPT_VOCAB": 512},
    "resnet": {"RESNET_WIDTH": 8, "RESNET_BATCH": 16},
    "unet": {"UNET_WIDTH": 4, "UNET_BATCH": 2, "UNET_IMAGE": 32},
}
FEW_FAULTS = 32
"""Of a step, by Python and by what lies outside of the graphs."""


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("example", "budget"),
    [
        ("gpt", "100%"),
        *(pytest.param(name, "80%", marks=pytest.mark.slow) for name in SMALL),
    ],
)
def test_examples_in_arenas(example: str, budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL[example].items():
        monkeypatch.setenv(name, str(value))
    # The U-Net's first schedule takes seconds, which on a busy machine are many.
    row = measured(example, budget, 4, time_limit_s=AMPLE_S, gap=0.01)
    assert row.is_equal
    assert row.arena.counts.misses == 0
    assert row.arena.counts.hits == 5 * len(row.arena.layout.offsets_bytes)
    assert row.faults[1] <= FEW_FAULTS
    assert str(row).startswith(f"| {example} | {budget} |")
