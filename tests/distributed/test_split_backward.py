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


@pytest.mark.slow
def test_a_v_of_stages_has_eagers_gradients_and_products(tmp_path: Path) -> None:
    found = ranks("split_worker.py", tmp_path, 2, "ZBVZeroBubble", limit_s=LIMIT_S)
    require_eagers(found, "ZBVZeroBubble")


OTHERS = ("InterleavedZeroBubble", "DualPipeV")
UNDER_FSDP2 = "ZBVZeroBubble+FSDP2"


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All other cases in one launch, since starting takes long."""
    folder = tmp_path_factory.mktemp("split")
    return ranks("split_worker.py", folder, 2, *OTHERS, UNDER_FSDP2, limit_s=3 * LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_schedules_do(others: Found, name: str) -> None:
    require_eagers(others, name)


@pytest.mark.slow
def test_under_fsdp2_no_gradient_is_lost(others: Found) -> None:
    for found in (rank[UNDER_FSDP2] for rank in others):
        assert found["same"]
        assert found["n"] > 40
