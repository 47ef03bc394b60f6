"""The file of costs under faults: full disks, processes at the same time, users without a home."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from pathlib import Path

import pytest

from remat.graph_capture import files
from remat.graph_capture.costs.cache import CostCache, OpCost
from tests.files.faults import CALLS, FULL, fail_once, names_in

SAVES, WORKERS = 10, 4


@pytest.mark.parametrize("call", CALLS)
def test_costs_that_cannot_be_saved_are_warned_about(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    first = CostCache("a machine")
    first.costs["one"] = OpCost(1.0)
    first.save()
    there = names_in(tmp_path)
    second = CostCache("a machine")
    second.costs["two"] = OpCost(2.0)
    fail_once(monkeypatch, call)
    with pytest.warns(UserWarning, match=f"costs are not kept .*{FULL}"):
        second.save()
    assert list(CostCache("a machine").costs) == ["one"]
    assert names_in(tmp_path) == there
    second.save()
    assert sorted(CostCache("a machine").costs) == ["one", "two"]


def save_costs(worker: int) -> None:
    for i in range(SAVES):
        cache = CostCache("a machine")
        cache.costs[f"{worker} {i}"] = OpCost(1.0)
        cache.save()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_processes_that_save_at_the_same_time_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=save_costs, args=(i,)) for i in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * WORKERS
    assert len(CostCache("a machine").costs) == SAVES * WORKERS
    assert [one.suffix for one in sorted(tmp_path.iterdir())] == [".json", ".lock"]


def test_a_lock_that_nobody_lets_go_of_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WAIT_S", 0.1)
    path = tmp_path / "prices.json"
    with files.file_lock(path), files.file_lock(path):
        assert names_in(tmp_path) == ["prices.json.lock"]


@pytest.mark.parametrize("code", files.NO_LOCKS)
def test_costs_are_kept_where_a_file_system_has_no_locks(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refusing)
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    cache = CostCache("a machine")
    cache.costs["one"] = OpCost(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.save()
    assert list(CostCache("a machine").costs) == ["one"]


def test_a_user_without_a_home_has_costs_for_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("REMAT_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(files.Path, "home", homeless)
    files._own_folder.cache_clear()
    with pytest.warns(UserWarning, match="set REMAT_CACHE.*there is no home folder"):
        cache = CostCache("a machine")
    cache.costs["one"] = OpCost(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.save()
        assert list(CostCache("a machine").costs) == ["one"]
