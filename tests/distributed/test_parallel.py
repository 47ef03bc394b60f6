"""Tensor and sequence parallel models on two ranks and four, over gloo: eager's bits, no hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.failing_worker import TIMEOUT_S
from tests.distributed.launch import Found, ranks, require_refused
from tests.distributed.parallel_worker import BUDGETS

pytestmark = pytest.mark.slow

LIMIT_S = 1800
"""A launch that takes longer hangs; the collectives would wait as long as their own timeout."""
TRAINED = ("tp", "sp", "dropout", "prepared")
IN_BLOCKS = ("tp_blocks", "sp_blocks")
TOGETHER = ("warm_and_cold", "another_model", "failing_check", "other_orders", "refused")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All cases on two ranks, in one launch, since starting takes long."""
    folder, names = tmp_path_factory.mktemp("parallel"), (*TRAINED, *IN_BLOCKS, *TOGETHER)
    return ranks("parallel_worker.py", folder, 2, *names, limit_s=LIMIT_S)


@pytest.mark.parametrize("case", TRAINED)
def test_two_steps_have_eagers_bits_at_all_budgets(two: Found, case: str) -> None:
    for found in (one[case] for one in two):
        assert found["n"] > 30
        for budget in BUDGETS:
            assert found[budget], budget
        assert found["collectives min"] >= found["collectives 100%"] > 0
    assert two[0][case]["hashes"] == two[1][case]["hashes"], "one plan for all"


@pytest.mark.parametrize("case", IN_BLOCKS)
def test_blocks_have_eagers_bits(two: Found, case: str) -> None:
    for found in (one[case] for one in two):
        assert found["n"] > 30
        assert found["100%"]
        assert found["75%"]
        assert found["min"]


def test_blocks_are_sharded_by_fsdp2_over_another_dimension(tmp_path: Path) -> None:
    for found in ranks("parallel_worker.py", tmp_path, 4, "with_fsdp2", limit_s=LIMIT_S):
        same = found["with_fsdp2"]
        assert len(same) == 4
        assert all(same.values()), same


def test_costs_of_one_rank_alone_keep_nobody_waiting(two: Found) -> None:
    plans = [found["warm_and_cold"]["plans"] for found in two]
    assert len(plans[0]) == 2
    assert plans[0] == plans[1]


def in_time(said: dict[str, Any]) -> bool:
    return said["seconds"] < TIMEOUT_S / 2


def test_another_model_on_one_rank_is_named_on_both(two: Found) -> None:
    for said in (found["another_model"] for found in two):
        assert said["error"] == "AgreementError"
        assert "the step captured on rank 1 is not that of rank 0" in said["text"]
        assert in_time(said)


def test_a_check_that_fails_on_one_rank_ends_both(two: Found) -> None:
    for said in (found["failing_check"] for found in two):
        assert said["error"] == "RewriteError"
        assert "it differs here" in said["text"]
        assert in_time(said)


def test_ranks_that_plan_alone_are_refused_unless_their_orders_agree(two: Found) -> None:
    for said in (found["other_orders"] for found in two):
        assert said["error"] == "AgreementError"
        assert "run collectives in different orders" in said["text"]
        assert in_time(said)
        assert said["same"]


REFUSED = {
    "no_group": ("AgreementError", r"group=torch\.distributed\.group\.WORLD.* needs ranks 0, 1"),
    "by_inductor": ("RewriteError", r"leave out compile=True: .*DTensors"),
    "range": ("CaptureError", r"leave out dynamic, .* DTensors"),
    "argument": ("CaptureError", r"\.to_local\(\).*: args\[0\] is a DTensor"),
    "result": ("CaptureError", r"use_local_output=True.*: the result of Sequential is a DTensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_plan_holds_is_refused_on_each_rank(two: Found, case: str) -> None:
    for found in two:
        require_refused(found["refused"][case], REFUSED[case])
