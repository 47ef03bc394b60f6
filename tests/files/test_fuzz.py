"""Damaged files of all kinds: one clear error of ours, or a value that a sound file gives too.

Nothing is run and nothing is written meanwhile. What goes wrong is drawn by hypothesis, which
brings each failure down to a small one; the draws are the same in every run.
"""

from __future__ import annotations

import random
import subprocess
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remat.graph_capture.costs.cache import CostCache, OpCost, WholeStepTimes
from remat.progress import MOST_WORD, in_one_line
from tests.files.damage import TO_BYTES, TO_JSON
from tests.files.kinds import ERRORS, FileKind, archive, kinds, plan

CASES = 300
KINDS = kinds()
PLAN = plan().to_json()
files = settings(
    max_examples=CASES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[*HealthCheck],
)
draws = given(draw=st.randoms(use_true_random=False))


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading starts no process, compiles nothing, and unpickles nothing."""
    for place, name in ((subprocess, "Popen"), (torch, "load")):
        monkeypatch.setattr(place, name, lambda *_, **__: pytest.fail("something was run"))


def damaged(kind: str, draw: random.Random) -> bytes:
    """The file of a kind after one to three mishaps."""
    data = KINDS[kind].valid
    ways = TO_BYTES if kind == "archive" else TO_JSON
    if kind == "archive" and draw.choice((True, False)):
        # What is within the archive goes wrong, and is packed again without a fault.
        return archive(draw.choice(TO_JSON)(PLAN, draw))
    return draw.choice(ways)(data, draw)


def outcome(kind: FileKind, path: Path) -> object:
    """What the reader gives, or its error in one line."""
    try:
        return kind.read(path)
    except ERRORS as error:
        said = in_one_line(str(error))
        assert said
        assert said.isprintable()
        assert max(map(len, said.split())) <= MOST_WORD
        return said


@pytest.mark.parametrize("name", KINDS)
def test_a_sound_file_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"file{KINDS[name].suffix}"
    path.write_bytes(KINDS[name].valid)
    assert not isinstance(outcome(KINDS[name], path), str)


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_refused_or_sound(name: str, tmp_path: Path) -> None:
    kind, seen = KINDS[name], Counter[bool]()
    path = tmp_path / f"file{kind.suffix}"

    @files
    @draws
    def judge(draw: random.Random) -> None:
        data = damaged(name, draw)
        path.write_bytes(data)
        found = outcome(kind, path)
        is_refused = isinstance(found, str)
        seen[is_refused] += 1
        if is_refused:
            assert str(path) in found or "the batch in the plan file" in found
        else:
            # Read again, it gives the same: nothing of it depends on what was read before.
            assert found == kind.read(path)
        assert path.read_bytes() == data
        assert [one.name for one in tmp_path.iterdir()] == [path.name]

    judge()
    assert seen.total() >= CASES
    assert seen[True] > CASES // 2
    assert seen[False] > 0


def test_a_damaged_cost_cache_is_left_alone_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    cache, seen = CostCache("a machine"), Counter[bool]()
    cache.costs |= {"aten.mm(2x2)": OpCost(3.5, 64), "aten.exp(4)": OpCost(1.25, is_estimate=True)}
    cache.steps |= {"ab": WholeStepTimes(9.0, 1.0)}
    cache.save()
    valid = cache.path.read_bytes()

    @files
    @draws
    def judge(draw: random.Random) -> None:
        cache.path.write_bytes(draw.choice(TO_JSON)(valid, draw))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = CostCache("a machine")
        seen[bool(told)] += 1
        for warning in told:
            assert str(cache.path) in str(warning.message)
            assert not found.costs
            assert not found.steps
        assert all(0 <= cost.cost_us <= 1e100 for cost in found.costs.values())

    judge()
    assert seen[True] > CASES // 3
    assert seen[False] > 0
