"""Two ranks train whole steps with a host tier: one process's bits, the judged peaks."""

from __future__ import annotations

import pytest

from tests.distributed.launch import Found, ranks

LIMIT_S = 1200
TRAINED = ("gpt", "nvme", "one", "whole", "momentum", "frozen")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return ranks("whole_steps/worker.py", tmp_path_factory.mktemp("two"), 2, limit_s=LIMIT_S)


@pytest.mark.parametrize("case", TRAINED)
def test_ranks_train_as_one_process_that_has_all_batches(two: Found, case: str) -> None:
    """Losses; and parameters and states made whole, after steps from memory and from below."""
    for found in (one[case] for one in two):
        assert all(found["losses"])
        assert all(found["equal"])
        assert found["steps"] == two[0][case]["steps"], "ranks follow one plan"
        assert "host" in found["homes"]
        assert ("nvme" in found["homes"]) == (case == "nvme")


@pytest.mark.parametrize("case", TRAINED)
@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_the_measured_peak_of_each_tier_is_the_judged_one(two: Found, case: str, tier: str) -> None:
    for judged, measured in (one[case][tier] for one in two):
        assert measured == judged
        assert bool(judged) == (tier != "nvme" or case == "nvme")


@pytest.mark.parametrize("case", TRAINED)
def test_a_rank_keeps_its_half_between_steps(two: Found, case: str) -> None:
    for found in (one[case] for one in two):
        assert 0.5 <= found["share"] < 0.51
        assert found["forward"]["error"] == "RewriteError"
        assert "call bring_back(whole=True) of the step on all ranks" in found["forward"]["text"]


def test_a_closed_step_leaves_the_whole_model(two: Found) -> None:
    assert all(one["closed"] == {"equal": True, "after": True} for one in two)


def test_ranks_that_ask_for_other_steps_are_refused(two: Found) -> None:
    for one in two:
        for what, found in one["differing"].items():
            assert found["error"] == ("AgreementError" if what else "BudgetError"), what
            assert not what or found["text"].startswith(f"give the same {what} on all ranks")


def test_a_batch_that_one_rank_refuses_runs_on_none(two: Found) -> None:
    for found in (one["batch of one"] for one in two):
        assert "drop or pad the last batch" in found["text"]
        assert found["equal"]
        for held in found["held"]:
            assert held["text"].startswith("call bring_back(whole=True) of the step on all ranks")
    assert "(on rank 1; the step has run on no rank)" in two[0]["batch of one"]["text"]


def test_other_ranks_than_those_of_the_sharding_are_refused(two: Found) -> None:
    for one in two:
        assert one["alone"]["error"] == "DeviceError"
        assert one["alone"]["text"].startswith("start 4 processes with torchrun")
