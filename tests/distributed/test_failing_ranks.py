"""Ranks of which one fails, and collectives in a model: nobody waits for ever, over gloo."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.distributed.failing_worker import TIMEOUT_S
from tests.distributed.launch import Found, ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All cases on two ranks, in one launch, since starting takes long."""
    return ranks("failing_worker.py", tmp_path_factory.mktemp("failing"), 2)


def in_time(found: dict[str, Any]) -> bool:
    """Whether a rank learnt of an error long before its collectives would have given up."""
    return found["seconds"] < TIMEOUT_S / 2


FAILING = {
    "type_error": (0, "TypeError", "TypeError: a number is no glob"),
    "interrupt": (0, "KeyboardInterrupt", "KeyboardInterrupt"),
}


@pytest.mark.parametrize("case", FAILING)
def test_any_error_of_one_rank_is_named_on_the_other(two: Found, case: str) -> None:
    failing, kind, text = FAILING[case]
    own, other = two[failing][case], two[1 - failing][case]
    assert own["error"] == kind
    assert other["error"] == "AgreementError"
    assert f"rank {failing}: remat.rematerialize ended there with {text}" in other["text"]
    assert "failing_worker.py:" in other["text"], "the place of the error is named"
    assert in_time(own)
    assert in_time(other)


@pytest.mark.parametrize("case", ["forward", "check"])
def test_an_error_of_remats_own_keeps_its_class(two: Found, case: str) -> None:
    kind, text = {
        "forward": ("CaptureError", "KeyError: 'no such key'"),
        "check": ("RewriteError", "it differs here"),
    }[case]
    assert [found[case]["error"] for found in two] == [kind, kind]
    assert text in two[0][case]["text"]
    assert "(on rank 1)" in two[0][case]["text"]
    assert all(in_time(found[case]) for found in two)


def test_no_rank_runs_a_check_that_another_leaves_out(two: Found) -> None:
    for found in two:
        assert found["one_does_not_check"]["error"] == ""
        assert found["one_does_not_check"]["same"]


def require_eagers_bits(all_found: Found, case: str) -> None:
    for found in all_found:
        assert found[case]["same"]
        assert found[case]["n"] == 6
        assert found[case]["recomputed"] > 0
        assert found[case]["peak_bytes"] <= found[case]["budget_bytes"]


def test_collectives_train_to_eagers_bits(two: Found) -> None:
    """With costs of no rank, of both, and of one alone."""
    require_eagers_bits(two, "all_reduce")


@pytest.mark.parametrize("case", ["gather", "coalesced"])
def test_other_collectives_train_to_eagers_bits(two: Found, case: str) -> None:
    require_eagers_bits(two, case)


def test_collectives_need_a_group(two: Found) -> None:
    for found in two:
        assert found["no_group"]["error"] == "AgreementError"
        assert re.search(
            r"group=torch\.distributed\.group\.WORLD.*all_reduce.* of module \(root\) "
            r"\(.*failing_worker.py:\d+\) needs ranks 0, 1, ",
            found["no_group"]["text"],
        )


@pytest.mark.parametrize("case", ["by_inductor", "compiled"])
def test_collectives_in_compiled_code(two: Found, case: str) -> None:
    assert all(found[case]["error"] < 1e-5 for found in two)


@pytest.mark.parametrize("case", ["collective_not_compiled", "ddp_not_compiled"])
def test_a_graph_that_one_rank_cannot_compile_fails_on_both(two: Found, case: str) -> None:
    assert "BudgetError: nothing fits here" in two[1][case]["text"]
    assert "nothing fits here (on rank 1)" in two[0][case]["text"]
    assert all(in_time(found[case]) for found in two)
