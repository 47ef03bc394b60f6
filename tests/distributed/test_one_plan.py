"""Two ranks that compile one graph: one plan, and no rank that waits for a failed one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.failing_worker import TIMEOUT_S
from tests.distributed.launch import Found, ranks
from tests.distributed.one_plan_worker import CASES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return ranks("one_plan_worker.py", tmp_path_factory.mktemp("one"), 2, *CASES)


@pytest.mark.parametrize("case", ["collectives", "ddp"])
def test_ranks_with_other_costs_follow_one_plan(two: Found, case: str) -> None:
    """With costs kept by no rank, by the first alone, and by both."""
    for plans in zip(*(found[case]["plans"] for found in two), strict=True):
        assert plans[0] == plans[1]
    for found in two:
        assert found[case]["recomputed"] > 0
        assert found[case]["within"]
        assert found[case]["same"], "gradients are those of torch.compile without a budget"


def test_sharded_blocks_keep_to_the_budget_by_one_plan(two: Found) -> None:
    for budget in ("100%", "min"):
        for found in (one["fsdp2_blocks"][budget] for one in two):
            assert found["peak_bytes"] <= found["budget_bytes"]
            assert found["error"] < 1e-5
            assert found["plans"] == two[0]["fsdp2_blocks"][budget]["plans"]


@pytest.mark.parametrize("bucket_mb", ["2", "4", "25"])
def test_a_model_in_buckets_keeps_to_the_budget_by_one_plan(two: Found, bucket_mb: str) -> None:
    for found in (one["ddp_buckets"][bucket_mb] for one in two):
        assert found["peak_bytes"] <= found["budget_bytes"]
        assert found["error"] < 1e-5
        assert len(found["plans"]) > 1, "DDP cuts nothing any more"
        assert found["plans"] == two[0]["ddp_buckets"][bucket_mb]["plans"]


def require_told(found: list[dict[str, Any]], phase: str) -> None:
    """Both ranks end with the error, long before a collective would have given up."""
    rank = int(phase.rpartition(" ")[2])
    for number, said in enumerate(one[phase] for one in found):
        assert "no space left for" in said["text"], (phase, number, said)
        assert said["seconds"] < TIMEOUT_S / 2
        if number != rank and rank >= 0:
            assert f"see the traceback of rank {rank}" in said["text"]
            assert "ended there with OSError" in said["text"]


@pytest.mark.parametrize("case", ["plan_phases", "compile_phases", "compile_phases_collectives"])
def test_a_failure_of_any_rank_at_any_phase_reaches_the_other(two: Found, case: str) -> None:
    phases = list(two[0][case])
    assert len(phases) >= 8
    for phase in phases:
        require_told([found[case] for found in two], phase)
