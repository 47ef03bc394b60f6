"""Units run in order until the deadline, one at a time on the GPU, and no row is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.rows import RowFile
from benchmarks.gpu.scheduler import Desk, Group, OutOfTimeError, Settings, Unit, run
from tests.benchmarks.gpu.fake_units import (
    KEPT,
    LONG_S,
    begin_and_raise,
    begin_beside,
    group,
    in_turn,
)
from tests.paths import ROOT

KILLED_S = 60.0
"""Within which the system ends a process that is killed."""


@pytest.fixture
def rows(tmp_path: Path) -> RowFile:
    return RowFile(tmp_path / "rows.jsonl")


def left_of(
    groups: Sequence[Group], rows: RowFile, seconds: float = LONG_S, workers: int = 1
) -> list[str]:
    settings = Settings(rows, time.monotonic() + seconds, rows.path.parent)
    return run(groups, settings, workers)


def asleep() -> set[str]:
    """Processes as a fake unit starts them."""
    found: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_text().startswith(f"sleep\0{LONG_S}"):
                found.add(path.parent.name)
    return found


def test_units_run_in_order_and_each_leaves_its_row(rows: RowFile) -> None:
    groups = [group("a", "a 1", "a 2"), group("b", "b 1")]
    assert left_of(groups, rows) == []
    assert list(rows.read()) == ["a 1", "a 2", "b 1"]
    first, second, third = (row["process"] for row in rows.read().values())
    assert first == second != third


def test_one_holds_the_gpu_and_then_the_first_that_waits(rows: RowFile) -> None:
    assert left_of(in_turn(5), rows, workers=5) == []
    held = (rows.path.parent / "held").read_text()
    assert held == "0 /0 1 /1 2 /2 3 /3 4 /4 "


def test_what_would_not_end_in_time_does_not_begin(rows: RowFile) -> None:
    long = group("a", "a 1", estimate_s=2 * LONG_S)
    mixed = Group("b", (*long.units, *group("b", "b 1").units), begin_beside)
    late = Group("c", group("c", "c 1").units, begin_beside, setup_s=2 * LONG_S)
    assert left_of([long, mixed, late], rows) == ["a 1", "a 1", "c 1"]
    assert list(rows.read()) == ["b 1"]


def test_a_unit_that_waited_too_long_for_the_gpu_does_not_begin(rows: RowFile) -> None:
    settings = Settings(rows, time.monotonic() + LONG_S, rows.path.parent)
    desk = Desk(settings, unit=Unit("a 1", 2 * LONG_S))
    with pytest.raises(OutOfTimeError, match="a 1"), desk.gpu():
        pass
    desk.unit = None
    with desk.gpu(), desk.gpu():  # it was given back, and may be taken within
        assert Desk(settings, 1)._waits(0) is False


def test_what_runs_at_the_deadline_is_ended_with_what_it_started(rows: RowFile) -> None:
    before = asleep()
    assert left_of([group("a", "a sleeps", "a 2")], rows, seconds=3.0) == ["a sleeps", "a 2"]
    end_s = time.monotonic() + KILLED_S
    while not asleep() <= before:
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_rows_that_are_there_are_skipped_and_one_cut_off_is_not(rows: RowFile) -> None:
    rows.append({"row": "a 1", "kept": True})
    with rows.path.open("a") as file:
        file.write('{"row": "a 2", "kept": tr')
    assert left_of([group("a", "a 1", "a 2")], rows) == []
    assert rows.read()["a 1"] == {"row": "a 1", "kept": True}
    assert "process" in rows.read()["a 2"]
    assert len(rows.path.read_text().splitlines()) == 3


def test_of_two_rows_with_a_key_the_last_counts(rows: RowFile) -> None:
    for number in (1, 2):
        rows.append({"row": "a", "number": number})
    rows.path.write_text(rows.path.read_text() + '"no row"\n[]\n{"number": 3}\n')
    assert rows.read() == {"a": {"row": "a", "number": 2}}


def test_an_error_is_a_row_and_others_go_on(rows: RowFile) -> None:
    assert left_of([group("a", "a raises", "a 2")], rows) == []
    assert rows.read()["a raises"]["error"] == "ValueError: as it was told"
    assert "process" in rows.read()["a 2"]


def test_a_group_that_cannot_begin_says_so_in_each_row(rows: RowFile) -> None:
    one = group("a", "a 1", "a 2")
    assert left_of([Group("a", one.units, begin_and_raise)], rows) == []
    told = {row["error"] for row in rows.read().values()}
    assert told == {"a: ValueError: group 0 cannot begin"}


def test_a_process_that_dies_loses_the_unit_that_it_was_at(rows: RowFile) -> None:
    assert left_of([group("a", "a 1", "a dies", "a 3")], rows) == []
    found = rows.read()
    assert found["a dies"]["error"] == f"its process ended with status {-signal.SIGKILL}"
    assert found["a 1"]["process"] != found["a 3"]["process"]


def test_after_an_error_of_the_gpu_another_process_goes_on(rows: RowFile) -> None:
    assert left_of([group("a", "a 1", "a breaks", "a 3")], rows) == []
    found = rows.read()
    assert "illegal memory access" in found["a breaks"]["error"]
    assert found["a 1"]["process"] != found["a 3"]["process"]


@pytest.mark.parametrize("count", [1, 4])
def test_killed_after_so_many_rows_it_keeps_them_and_ends_the_rest(
    count: int, rows: RowFile
) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.gpu.fake_units", str(rows.path)]
    ran = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    while len(rows.read()) < count:
        assert ran.poll() is None or len(rows.read()) >= count
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(ran.pid, signal.SIGKILL)
    ran.wait()
    kept = rows.read()
    assert left_of(KEPT, rows) == []
    assert {key: rows.read()[key] for key in kept} == kept
    lines = [json.loads(line) for line in rows.path.read_text().splitlines()]
    assert [line["row"] for line in lines] == [unit.key for one in KEPT for unit in one.units]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "run", "--seconds", "9"]
    ran = subprocess.run(
        [*command, "--rows", str(tmp_path / "rows.jsonl")], cwd=ROOT, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr == "benchmarks.gpu: pass --rehearse: there is no CUDA device here\n"
    assert not (tmp_path / "rows.jsonl").exists()
