"""Bits are compared once on a device; chunks that are exact cost no less than the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from remat.graph_capture.capture_api import capture
from remat.graph_capture.chunking import same_bits
from remat.graph_capture.chunking.regions import RegionCandidate
from tests.graph_capture.chunking.language_models import LanguageModel, batch, made, plain


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, int]]:
    """What is compared, with a cache that knows nothing yet."""
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    seen: list[tuple[str, int]] = []
    compare = same_bits.matches_eager_bitwise

    def noted(found: RegionCandidate) -> bool | None:
        seen.append((found.name, found.chunks))
        return compare(found)

    monkeypatch.setattr(same_bits, "matches_eager_bitwise", noted)
    return seen


def test_bits_are_compared_once_for_a_head_of_these_shapes(
    compared: list[tuple[str, int]],
) -> None:
    model, args = made("plain")
    first = capture(model, args, split="exact")
    assert compared == [("_log_softmax", chunks) for chunks in (2, 4, 8, 16)]
    other = LanguageModel(plain)
    assert capture(other, args, split="exact").regions == first.regions
    assert len(compared) == 4
    capture(model, batch(rows=7), split="exact")
    assert len(compared) == 8


def test_other_kernels_are_compared_anew(
    compared: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args = made("plain")
    capture(model, args, split="exact")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    capture(model, args, split="exact")
    assert len(compared) == 8


def test_a_no_is_kept_too(compared: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    noted = same_bits.matches_eager_bitwise
    monkeypatch.setattr(same_bits, "matches_eager_bitwise", lambda found: noted(found) and False)
    model = LanguageModel(plain, dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.warns(UserWarning, match="stays whole"):
            assert capture(model, batch(), split="exact").regions == ()
    assert len(compared) == 4


def test_exact_chunks_take_no_less_time_than_the_whole() -> None:
    graph = capture(*made("plain"), split="exact", device="h100")
    (region,) = graph.regions
    whole_us = sum(op.cost_us for op in graph.ops if op.name in region.ops)
    for choice in region.choices:
        assert sum(op.cost_us for _, op in choice.ops) >= whole_us * (1 - 1e-9)
