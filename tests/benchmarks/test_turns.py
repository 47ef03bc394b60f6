"""Who may prepare beside whom, and who is alone."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from benchmarks.beside.turns import Quiet, Turns


def may_prepare(path: Path) -> bool:
    """Whether another process could begin to prepare now."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_many_prepare_and_one_measures(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    turns = Turns(path)
    with turns.preparing():
        assert may_prepare(path)
        with turns.alone():
            assert not may_prepare(path)
        assert may_prepare(path)
    with turns.measuring():
        assert not may_prepare(path)
    assert may_prepare(path)
    assert 0 <= turns.waited_s < 1


def test_ops_are_timed_alone_once(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    quiet = Quiet(Turns(path), tmp_path / "priced")
    seen: list[bool] = []
    with quiet.turns.preparing():
        for _ in range(2):
            with quiet.pricing():
                seen.append(may_prepare(path))
        with quiet.solving():
            seen.append(may_prepare(path))
    assert seen == [False, True, False]


def test_prices_that_failed_are_not_taken_as_kept(tmp_path: Path) -> None:
    quiet = Quiet(Turns(tmp_path / "turns"), tmp_path / "priced")
    with pytest.raises(ZeroDivisionError), quiet.turns.preparing(), quiet.pricing():
        raise ZeroDivisionError
    assert not quiet.priced.exists()
    assert may_prepare(tmp_path / "turns")
