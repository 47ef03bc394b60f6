"""docs/together.md says of each pair of levers what the code does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.rows import rows
from tests.together.levers import EXCLUDED, RANKS
from tests.together.table import (
    DOCS,
    EXCLUDES,
    FAULT,
    MARKS,
    OF_MODELS,
    TRIPLES,
    marks_of,
    outcomes,
    pairs,
    ranks_of,
    refused_by_options,
)
from tests.together.trial import outcome

KEPT = marks_of(DOCS.read_text(encoding="utf-8"))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_page_refuses_what_the_code_refuses(one_rank: None) -> None:
    refused = {pair for pair, mark in KEPT.items() if mark == MARKS["refused"]}
    assert refused - OF_MODELS == refused_by_options() - OF_MODELS
    assert refused >= OF_MODELS


def test_the_page_has_no_fault_and_most_pairs_work() -> None:
    assert FAULT not in KEPT.values()
    assert {pair for pair, mark in KEPT.items() if mark == EXCLUDES} == EXCLUDED.keys()
    works = [mark in (MARKS["exact"], MARKS["within"]) for mark in KEPT.values()]
    assert sum(works) >= 0.8 * (len(KEPT) - len(EXCLUDED))


QUICK = ("HU", "SP", "HD")


@pytest.mark.parametrize("pair", rows((p for p in pairs() if ranks_of(p) == 1), QUICK.__contains__))
def test_a_pair_does_what_the_page_says(pair: str) -> None:
    found = outcome(pair, is_autocast=pair in TRIPLES)
    assert MARKS.get(found.verdict, FAULT) == KEPT[pair], found


@pytest.mark.slow
def test_pairs_on_ranks_do_what_the_page_says() -> None:
    asked = [pair for pair in pairs() if set(pair) & RANKS and pair not in EXCLUDED]
    found = outcomes(asked)
    assert {p: MARKS.get(found[p].verdict, FAULT) for p in asked} == {p: KEPT[p] for p in asked}
