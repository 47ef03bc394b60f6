"""Kept plans of compiled steps: read whole or not at all, judged, and never in the way."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from remat import solver
from remat.compile import start
from remat.compile.start import CHOICES_FOLDER, KeptChoice, keep_choice, kept_choice
from remat.graph_capture.costs.cache import CostCache, OpCost
from remat.graph_capture.graph import TrainingGraph
from remat.rewriter.inductor.replay import ReplayedMemory
from remat.schedules.simulate import simulate
from tests.files.faults import CALLS, FULL, fail_once
from tests.solver.graphs.random_graphs import chain

KEY = "ab" * 32
DAMAGES = 200
SAVES, WORKERS = 10, 4


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    return tmp_path / CHOICES_FOLDER


def choice(graph: TrainingGraph | None = None, key: str = KEY, **changed: object) -> KeptChoice:
    """What might be kept of a chain, with two fifths of it computed again."""
    graph = graph or chain(12)
    everything = solver.solve_within(graph, 2**62, "store_all").peak_bytes
    result = solver.solve_within(graph, 3 * everything // 4, "cut")
    assert result.schedule is not None
    made = KeptChoice(
        key, "a name", graph, result.schedule, result.lower_bound_us, ReplayedMemory(9, 8, 7, 1),
        ReplayedMemory(6, 5, 4, 1),
        static_bytes=3, dynamic_bytes=2, gradient_bytes=1, budget_bytes=11,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changed)


def write(path: Path, data: bytes) -> None:
    """A file whose digest is right, whatever it says."""
    path.write_bytes(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


def test_what_is_kept_comes_back_and_is_judged(folder: Path) -> None:
    assert kept_choice(KEY) is None
    kept = choice()
    keep_choice(kept)
    found = kept_choice(KEY)
    assert found == kept
    assert kept.graph is not None
    assert kept.schedule is not None
    judged = simulate(kept.graph, kept.schedule)
    taken = kept.taken()
    assert taken.overhead == judged.overhead > 0
    assert taken.gap == pytest.approx(judged.time_us / kept.lower_bound_us - 1)
    assert taken.replays == 0
    assert kept_choice("cd" * 32) is None
    assert len(list(folder.iterdir())) == 1


def test_a_damaged_file_is_ignored_with_one_line(folder: Path) -> None:
    keep_choice(choice())
    (path,) = folder.iterdir()
    valid = path.read_bytes()
    for seed in range(DAMAGES):
        draw = random.Random(seed)
        data, at = bytearray(valid), draw.randrange(len(valid))
        if seed % 3 == 0:
            data = data[:at]
        elif seed % 3 == 1:
            data[at] ^= 1 << draw.randrange(8)
        else:
            data[at:at] = draw.randbytes(draw.randrange(1, 9))
        path.write_bytes(data)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert kept_choice(KEY) is None, f"seed {seed}"
        assert len(told) == 1, f"seed {seed}"
        assert "which is made anew" in str(told[0].message)
        assert "\n" not in str(told[0].message)


def other_graph() -> KeptChoice:
    return msgspec.structs.replace(choice(), graph=chain(9))


WRONG: dict[str, Callable[[], KeptChoice]] = {
    "the schedule of another graph": other_graph,
    "a bound above its time": lambda: choice(lower_bound_us=1e12),
    "a negative size": lambda: choice(static_bytes=-1),
    "a size that cannot be": lambda: choice(chosen=ReplayedMemory(2**70, 0, 0)),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_is_ignored_with_one_line(what: str, folder: Path) -> None:
    keep_choice(choice())
    (path,) = folder.iterdir()
    write(path, msgspec.json.encode(WRONG[what]()))
    with pytest.warns(UserWarning, match="which is made anew") as told:
        assert kept_choice(KEY) is None
    assert len(told) == 1


def test_a_file_of_another_key_or_release_is_not_taken(folder: Path) -> None:
    keep_choice(choice())
    (path,) = folder.iterdir()
    for foreign in (choice(key=KEY[:32] + "cd" * 16), choice(schema_version=0)):
        write(path, msgspec.json.encode(foreign))
        assert kept_choice(KEY) is None
    keep_choice(choice())
    assert kept_choice(KEY) is not None


def test_other_costs_than_those_of_the_plan_are_noticed() -> None:
    cache = CostCache()
    cache.costs |= {"mm": OpCost(3.5, 64), "exp": OpCost(1.0)}
    cache.save()
    keep_choice(choice(costs={"mm": OpCost(3.5, 64)}))
    assert kept_choice(KEY) is not None
    measured_again = CostCache()
    measured_again.forget()
    measured_again.costs["mm"] = OpCost(4.5, 64)
    measured_again.save()
    assert kept_choice(KEY) is None


def test_costs_of_a_plan_for_another_device_are_looked_for_among_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = CostCache("a card", "as it is set")
    card.costs["mm"] = OpCost(3.5, 64)
    card.save()
    graph = msgspec.structs.replace(chain(12), device="cuda:0")
    asked: list[str] = []

    def meter_of(device: str) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(title="a card", settings="as it is set")

    monkeypatch.setattr(start, "meter_of", meter_of)
    keep_choice(choice(graph, costs={"mm": OpCost(3.5, 64)}))
    assert kept_choice(KEY) is not None
    assert asked == ["cuda:0"]


@pytest.mark.parametrize("call", CALLS)
def test_a_plan_that_cannot_be_kept_is_warned_about(
    call: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_choice(choice())
    fail_once(monkeypatch, call)
    with pytest.warns(UserWarning, match=f"plans are not kept .*{FULL}"):
        keep_choice(choice(budget_bytes=12))
    found = kept_choice(KEY)
    assert found is not None
    assert found.budget_bytes == 11
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_cannot_be_made_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    monkeypatch.setenv("REMAT_CACHE", str(blocked))
    assert kept_choice(KEY) is None
    with pytest.warns(UserWarning, match="plans are not kept"):
        keep_choice(choice())


def test_those_that_were_not_used_for_longest_go_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "MOST_FILES", 3)
    keys = [f"{number:x}" * 64 for number in range(4)]
    one = choice()
    for number, key in enumerate(keys[:3]):
        keep_choice(msgspec.structs.replace(one, key=key))
        os.utime(folder / f"{key[:32]}.json", (number, number))
    assert kept_choice(keys[0]) is not None
    keep_choice(msgspec.structs.replace(one, key=keys[3]))
    assert [kept_choice(key) is not None for key in keys] == [True, False, True, True]


def test_a_plan_that_is_too_large_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "MOST_ENTRY_BYTES", 1000)
    keep_choice(choice())
    assert not folder.exists()
    folder.mkdir()
    (folder / f"{KEY[:32]}.json").write_bytes(b" " * 2000)
    with pytest.warns(UserWarning, match="it is larger than 1000 bytes"):
        assert kept_choice(KEY) is None


def keep_often(worker: int) -> None:
    one = choice()
    for number in range(SAVES):
        keep_choice(msgspec.structs.replace(one, budget_bytes=100 * worker + number))
        found = kept_choice(KEY)
        assert found is not None
    assert found.graph == one.graph


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_processes_that_keep_the_same_plan_leave_a_whole_one(folder: Path) -> None:
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=keep_often, args=(i,)) for i in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * WORKERS
    found = kept_choice(KEY)
    assert found is not None
    assert found.budget_bytes % 100 == SAVES - 1
    assert len(list(folder.iterdir())) == 1
