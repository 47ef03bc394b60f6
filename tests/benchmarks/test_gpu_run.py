"""What runs on a GPU is rehearsed without one, so that it works the first time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import compiled, copies, device, steps
from remat.graph_capture.graph import Links, TrainingGraph
from remat.rewriter.tiers.file_tier import host_places
from remat.rewriter.tiers.stream_tier import StreamTier
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import Simulation
from tests.paths import ROOT
from tests.rewriter.tiers.lazy_streams import LazyMachine

SCRIPT = ROOT / "benchmarks" / "gpu_run.sh"
MOST_S = 540


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_is_refused_in_one_line(tmp_path: Path) -> None:
    ran = subprocess.run(
        ["sh", SCRIPT, tmp_path / "figures"], capture_output=True, text=True, check=False,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr == "gpu_run: there is no CUDA device here\n"
    assert ran.stdout == ""
    assert not (tmp_path / "figures").exists()


def test_all_parts_end_within_nine_minutes() -> None:
    limits = re.findall(r'^ *part (?:"[^"]+"|\w+) (\d+) ', SCRIPT.read_text(), re.MULTILINE)
    assert len(limits) == 7
    profiles_s = 20  # of a second model
    assert sum(map(int, limits)) + profiles_s <= MOST_S


@pytest.mark.parametrize(
    ("words", "python", "said"),
    [
        (["--rehearse"], sys.executable, "gpu_run: --rehearse FOLDER: a folder that is not kept"),
        ([], "/nowhere/python", "gpu_run: /nowhere/python cannot import torch: set PYTHON to one"),
    ],
)
def test_what_it_cannot_do_is_one_line(words: list[str], python: str, said: str) -> None:
    ran = subprocess.run(
        ["sh", SCRIPT, *words], capture_output=True, text=True, check=False,
        env={"PYTHON": python, "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr.startswith(said)
    assert ran.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_rehearsal_ends_green_and_writes_every_file(tmp_path: Path) -> None:
    ran = subprocess.run(
        ["sh", SCRIPT, "--rehearse", tmp_path], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHON": sys.executable, "REMAT_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("exit code 0") == 8
    written = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    profiles = {"profile_gpt.json", "profile_resnet.json"}
    parts = {"links.json", "steps.json", "copies.json", "compiled.json", "zoo.json"}
    assert set(written) == profiles | parts
    assert all(written.values())


SMALL = ["gpt2-tiny", "--suite", "smoke", "--device", "cpu", "--budgets"]


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 autocast of a CPU, and few rounds."""

    def autocast(_: device.Bench) -> contextlib.AbstractContextManager[None]:
        return torch.autocast("cpu", torch.bfloat16)

    monkeypatch.setattr(device.Bench, "autocast", autocast)
    monkeypatch.setattr(device, "ROUNDS", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_cpu")
def test_steps_are_measured_beside_what_was_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.json"
    monkeypatch.setattr(sys, "argv", ["steps", *SMALL, "80%", "1KiB", "--out", str(path)])
    assert steps.main() == 0
    rows = json.loads(path.read_text())["models"]["gpt2-tiny"]["rows"]
    assert list(rows) == ["unmodified", steps.CHECKPOINTED, "80%", "1KiB"]
    assert rows["80%"]["predicted_peak_bytes"] < rows["unmodified"]["predicted_peak_bytes"]
    assert rows["80%"]["step_us"] > 0
    assert rows["1KiB"]["status"] == "infeasible"
    assert "every block checkpointed" in capsys.readouterr().out


@pytest.mark.slow
def test_compiled_steps_are_measured_and_errors_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "ROUNDS", 2)
    path = tmp_path / "compiled.json"
    monkeypatch.setattr(sys, "argv", ["compiled", *SMALL, "80%", "1KiB", "--out", str(path)])
    assert compiled.main() == 1
    rows = json.loads(path.read_text())["models"]["gpt2-tiny"]
    assert rows["torch.compile"]["gradients_off_by"] < 1e-3
    assert rows["80%"]["gradients_off_by"] < 1e-3
    assert rows["80%"]["predicted_peak_bytes"] <= rows["80%"]["budget_bytes"]
    assert "BudgetError" in rows["1KiB"]["error"]


def copied(path: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The rows of the small model at 80 %."""
    patch.setattr(sys, "argv", ["copies", *SMALL, "80%", "--out", str(path)])
    exact = torch.are_deterministic_algorithms_enabled()
    try:
        assert copies.main() == 0
    finally:
        torch.use_deterministic_algorithms(exact)
    return json.loads(path.read_text())["models"]["gpt2-tiny"]["80%"]


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_cpu")
def test_plans_with_copies_are_held_against_eager_and_the_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = copied(tmp_path / "copies.json", monkeypatch)
    assert list(rows) == ["unmodified", "recomputing", "copying", "both"]
    assert rows["recomputing"]["copied_bytes"] == 0
    assert rows["copying"]["copied_bytes"] > 0
    assert rows["copying"]["peak_bytes"] < rows["unmodified"]["peak_bytes"]
    assert all(row["gradients_equal"] == row["gradients"] for row in rows.values() if "gap" in row)


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_cpu")
def test_they_run_over_two_streams_and_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device, on streams that run at once: the same bits and the same peak."""
    machine = LazyMachine(eager=True)
    machine.install(monkeypatch)
    # Ops of a CPU read the memory of a tensor at once, so streams have to run at once.
    monkeypatch.setattr(machine.computing, "wait_event", lambda _: machine.run())

    def tier_for(
        graph: TrainingGraph, schedule: Schedule, links: Links | None, _: Simulation
    ) -> StreamTier | None:
        if not schedule.moves:
            return None
        assert links is not None
        made = StreamTier("cpu", host_places(graph, schedule), links, 0)
        made.require_room()
        return made

    monkeypatch.setattr("remat.rewriter.compiled.tier_for", tier_for)
    rows = copied(tmp_path / "copies.json", monkeypatch)
    assert rows["copying"]["gradients_equal"] == rows["copying"]["gradients"] > 0
    assert machine.ranges > 0


def test_what_is_wrong_with_a_plan_with_copies_is_told() -> None:
    right = {
        "gradients_equal": 3, "gradients": 3, "copied_bytes": 1,
        "predicted_peak_bytes": 100, "peak_bytes": 101,
    }  # fmt: skip
    assert copies.complaints({"unmodified": {"peak_bytes": 200}, "both": right}) == []
    wrong = {**right, "gradients_equal": 2, "peak_bytes": 110, "copied_bytes": 0}
    assert copies.complaints({"both": wrong}) == [
        "both: 2 of 3 gradients equal",
        "both: the peak is off by -9.1 %",
        "no plan copies anything",
    ]  # fmt: skip
