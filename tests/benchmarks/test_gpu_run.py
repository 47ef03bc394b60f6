"""What runs on a GPU is rehearsed without one, so that it works the first time."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import compiled, device, steps
from tests.paths import ROOT

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
    assert len(limits) == 6
    profiles_s = 20  # of a second model
    assert sum(map(int, limits)) + profiles_s <= MOST_S


@pytest.mark.slow
def test_steps_are_measured_beside_what_was_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def autocast(_: device.Bench) -> contextlib.AbstractContextManager[None]:
        return torch.autocast("cpu", torch.bfloat16)

    monkeypatch.setattr(device.Bench, "autocast", autocast)
    monkeypatch.setattr(device, "ROUNDS", 2)
    path = tmp_path / "steps.json"
    given = ["gpt2-tiny", "--suite", "smoke", "--device", "cpu", "--budgets", "80%", "1KiB"]
    monkeypatch.setattr(sys, "argv", ["steps", *given, "--out", str(path)])
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
    given = ["gpt2-tiny", "--suite", "smoke", "--device", "cpu", "--budgets", "80%", "1KiB"]
    monkeypatch.setattr(sys, "argv", ["compiled", *given, "--out", str(path)])
    assert compiled.main() == 1
    rows = json.loads(path.read_text())["models"]["gpt2-tiny"]
    assert rows["torch.compile"]["gradients_off_by"] < 1e-3
    assert rows["80%"]["gradients_off_by"] < 1e-3
    assert rows["80%"]["predicted_peak_bytes"] <= rows["80%"]["budget_bytes"]
    assert "BudgetError" in rows["1KiB"]["error"]
