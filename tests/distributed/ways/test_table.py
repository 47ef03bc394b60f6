"""docs/distributed.md says of each way of training on ranks what the code does."""

from __future__ import annotations

import pytest

from tests.distributed.ways.table import DOCS, FAULT, everything, mark_of, marks_of, outcomes

KEPT = marks_of(DOCS.read_text(encoding="utf-8"))
QUICK = (
    "Z:three steps", "f:three steps", "d:the same with group=", "d:no_sync, views of buckets",
    "Z:gradients summed unsynced, told", "Z:two blocks in a group", "D:summed unsynced, not told",
)  # fmt: skip
N_PARTS = 4


def require_as_kept(asked: list[str]) -> None:
    found = outcomes(asked)
    told = {one: found[one] for one in asked if mark_of(found[one]) != KEPT[one]}
    assert not told, {one: (KEPT[one], it) for one, it in told.items()}


def test_a_few_ways_do_what_the_page_says() -> None:
    require_as_kept(list(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(N_PARTS))
def test_all_ways_do_what_the_page_says(part: int) -> None:
    require_as_kept(everything()[part::N_PARTS])


def test_the_page_has_no_fault_and_peaks_above_the_predicted_are_told() -> None:
    assert FAULT not in KEPT.values()
    over = {one for one, mark in KEPT.items() if mark == "over"}
    assert over <= {one for one in KEPT if one.endswith(("not told", "not said"))}
