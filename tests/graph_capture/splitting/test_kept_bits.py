"""Bits are compared once on a device; pieces that are exact are priced no lower than the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from remat.graph_capture.capturing import capture
from remat.graph_capture.chunking import same_bits as kept_bits
from remat.graph_capture.chunking.regions import Found
from tests.graph_capture.splitting.language_models import LanguageModel, batch, made, plain


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, int]]:
    """What is compared, with a cache that knows nothing yet."""
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    seen: list[tuple[str, int]] = []
    compare = kept_bits.gives_eagers_bits

    def noted(found: Found) -> bool | None:
        seen.append((found.name, found.pieces))
        return compare(found)

    monkeypatch.setattr(kept_bits, "gives_eagers_bits", noted)
    return seen


def test_bits_are_compared_once_for_a_head_of_these_shapes(
    compared: list[tuple[str, int]],
) -> None:
    model, args = made("plain")
    first = capture(model, args, split="exact")
    assert compared == [("_log_softmax", pieces) for pieces in (2, 4, 8, 16)]
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
    noted = kept_bits.gives_eagers_bits
    monkeypatch.setattr(kept_bits, "gives_eagers_bits", lambda found: noted(found) and False)
    model = LanguageModel(plain, dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.warns(UserWarning, match="stays whole"):
            assert capture(model, batch(), split="exact").regions == ()
    assert len(compared) == 4


def test_exact_pieces_take_no_less_time_than_the_whole() -> None:
    graph = capture(*made("plain"), split="exact", device="h100")
    (region,) = graph.regions
    whole_us = sum(op.cost_us for op in graph.ops if op.name in region.ops)
    for choice in region.choices:
        assert sum(op.cost_us for _, op in choice.ops) >= whole_us * (1 - 1e-9)
