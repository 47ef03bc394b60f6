from __future__ import annotations

import pytest

from remat.budgets import Budget, auto_bytes, parse_budget
from remat.graph_capture.devices.memory import free_bytes
from remat.graph_capture.errors import BudgetError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("0.5 gib", 2**29),
        (" 64 KiB ", 2**16),
        ("1000B", 1000),
        (12345, 12345),
    ],
)
def test_sizes(text: str | int, size_bytes: int) -> None:
    assert parse_budget(text) == Budget("bytes", size_bytes=size_bytes)


def test_shares_and_words() -> None:
    assert parse_budget("60%") == Budget("share", share=0.6)
    assert parse_budget("37.5 %") == Budget("share", share=0.375)
    assert parse_budget("auto") == Budget("auto")
    assert parse_budget("MIN") == Budget("min")


def test_a_number_without_unit_is_refused_with_what_it_may_mean() -> None:
    with pytest.raises(
        BudgetError, match=r"'60' has no unit. Did you mean 60 bytes\? Write 60%, 60MiB or 60GiB"
    ):
        parse_budget("60")


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ("8GiX", "unknown unit 'gix': write 8MiB or 8GiB"),
        ("lots", "cannot be read: write it like 8GiB"),
        ("", "cannot be read"),
        ("0MiB", "leaves nothing to spend"),
        ("-1GiB", "leaves nothing to spend"),
        ("0%", "a share above 0%"),
        (0, "leaves nothing to spend"),
        (True, "is no size"),
        (8.5, "is a float"),
    ],
)
def test_refusals(budget: object, says: str) -> None:
    with pytest.raises(BudgetError, match=says):
        parse_budget(budget)  # type: ignore[arg-type]  # wrong on purpose


def test_auto_leaves_a_tenth() -> None:
    assert 0 < auto_bytes() < free_bytes()
