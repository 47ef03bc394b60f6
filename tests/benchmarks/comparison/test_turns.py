"""Who measures alone, on a core that the others keep off."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from benchmarks.comparison.cores import CORES
from benchmarks.comparison.turns import Quiet, Turns

needs_cores = pytest.mark.skipif(len(CORES) < 2, reason="a core apart needs another")


def is_free(path: Path) -> bool:
    """Whether another process could measure now."""
    try:
        with FileLock(path, timeout=0):
            return True
    except Timeout:
        return False


def test_one_at_a_time_measures(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    turns = Turns(path)
    assert is_free(path)
    with turns.alone():
        assert not is_free(path)
    assert is_free(path)
    assert 0 <= turns.waited_s < 1


def test_ops_are_timed_alone_once(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    quiet = Quiet(Turns(path), tmp_path / "timed")
    seen: list[bool] = []
    for _ in range(2):
        with quiet.timing():
            seen.append(is_free(path))
    with quiet.solving():
        seen.append(is_free(path))
    assert seen == [False, True, False]


def test_costs_that_failed_are_not_taken_as_kept(tmp_path: Path) -> None:
    quiet = Quiet(Turns(tmp_path / "turns"), tmp_path / "timed")
    with pytest.raises(ZeroDivisionError), quiet.timing():
        raise ZeroDivisionError
    assert not quiet.timed.exists()
    assert is_free(tmp_path / "turns")


def test_who_waited_for_the_costs_of_another_is_not_alone(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    answers = iter([False, True])
    with Turns(path).alone(unless=lambda: next(answers)):
        assert is_free(path)
    assert list(answers) == []


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process beside this one, in the same family."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@needs_cores
def test_others_keep_off_the_core_of_who_measures(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    turns = Turns(tmp_path / "turns", family=os.getpid())
    with turns.alone():
        (own,) = os.sched_getaffinity(0)
        assert os.sched_getaffinity(other.pid) == CORES - {own}
    assert os.sched_getaffinity(0) == os.sched_getaffinity(other.pid) == CORES


@needs_cores
def test_cores_are_given_back_after_an_error(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    def fail() -> None:
        other.kill()
        other.wait()
        raise ZeroDivisionError

    turns = Turns(tmp_path / "turns", family=os.getpid())
    with pytest.raises(ZeroDivisionError), turns.alone():
        fail()
    assert os.sched_getaffinity(0) == CORES
    assert is_free(tmp_path / "turns")


@needs_cores
def test_processes_of_others_stay_where_they_are(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    with Turns(tmp_path / "turns", family=other.pid).alone():
        assert os.sched_getaffinity(os.getppid()) == CORES
    assert os.sched_getaffinity(0) == os.sched_getaffinity(other.pid) == CORES
