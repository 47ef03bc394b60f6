"""Torch's zero bubble schedules over rewritten stages, on two ranks over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import Found, ranks

LIMIT_S = 900
WAYS = ("100%", "min", "blocks")


def require_eagers(found: Found, schedule: str) -> None:
    """Gradients and parameters of two steps are eager's; each planned product runs once."""
    for one in (rank[schedule] for rank in found):
        assert one["n"] > 70
        for way in WAYS:
            assert one[way]["same"], way
        assert one["100%"]["products"] == one["blocks"]["products"] == one["eager"]
        assert one["min"]["products"] == one["min"]["planned"] > one["eager"]


def test_a_v_of_stages_has_eagers_gradients_and_products(tmp_path: Path) -> None:
    found = ranks("split_worker.py", tmp_path, 2, "ZBVZeroBubble", limit_s=LIMIT_S)
    require_eagers(found, "ZBVZeroBubble")


@pytest.mark.slow
def test_other_schedules_do(tmp_path: Path) -> None:
    names = ("InterleavedZeroBubble", "DualPipeV")
    found = ranks("split_worker.py", tmp_path, 2, *names, limit_s=2 * LIMIT_S)
    for name in names:
        require_eagers(found, name)


@pytest.mark.slow
def test_under_fsdp2_no_gradient_is_lost(tmp_path: Path) -> None:
    case = "ZBVZeroBubble+FSDP2"
    for rank in ranks("split_worker.py", tmp_path, 2, case, limit_s=LIMIT_S):
        found = rank[case]
        assert found["same"]
        assert found["n"] > 40
