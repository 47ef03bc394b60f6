"""Pairs of levers on two ranks: bits of the same wrapper around eager, peaks, both took part."""

from __future__ import annotations

import pytest

from tests.distributed.launch import Found, ranks

pytestmark = pytest.mark.slow

ALIKE = (
    "sizes_of_ddp", "ddp_without_a_batch", "fsdp2_without_a_batch", "sizes_of_blocks",
    "head_of_blocks", "head_of_ddp", "updates_of_blocks", "host_of_blocks", "numbers_of_blocks",
    "pins_of_blocks",
)  # fmt: skip
ONE_PLAN = (
    "sizes_of_ddp", "ddp_without_a_batch", "fsdp2_without_a_batch", "sizes_of_blocks", "head_of_ddp"
)  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All cases in one launch, since starting takes longest."""
    return ranks("together/worker.py", tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize("case", ALIKE)
def test_five_steps_are_those_of_the_same_wrapper_around_eager(two: Found, case: str) -> None:
    assert [found[case]["same"] for found in two] == [True, True]


@pytest.mark.parametrize("case", ONE_PLAN)
def test_all_ranks_follow_one_plan(two: Found, case: str) -> None:
    assert two[0][case]["plan"] == two[1][case]["plan"]


@pytest.mark.parametrize(
    "case", ["sizes_of_blocks", "head_of_blocks", "updates_of_blocks", "host_of_blocks"]
)
def test_the_peak_is_the_predicted_one(two: Found, case: str) -> None:
    for found in (one[case] for one in two):
        assert found["measured_bytes"] == pytest.approx(found["predicted_bytes"], rel=0.01)


def test_each_lever_takes_part(two: Found) -> None:
    for found in two:
        assert found["sizes_of_ddp"]["members"] > 1
        assert found["sizes_of_blocks"]["members"] > 1
        assert found["head_of_blocks"]["chunks"] > 1
        assert found["head_of_ddp"]["chunks"] > 1
        assert found["updates_of_blocks"]["states"] == 27
        assert found["host_of_blocks"]["copies"] > 0
        assert (found["pins_of_blocks"]["kept"], found["pins_of_blocks"]["again"]) == (1, 2)


@pytest.mark.parametrize("case", ["ddp_without_a_batch", "fsdp2_without_a_batch"])
def test_one_plan_serves_the_sizes_of_all_ranks(two: Found, case: str) -> None:
    assert len(two[0][case]["plan"]) == 1


def test_updates_in_backward_name_the_way_of_ranks_that_takes_them(two: Found) -> None:
    for found in (one["updates_of_ddp"] for one in two):
        assert found["error"] == "CaptureError"
        assert found["text"].startswith("plan by blocks for fully_shard, with blocks= and")
