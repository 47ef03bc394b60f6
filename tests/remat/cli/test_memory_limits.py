"""Verbs in a process that may map little more than it has: the plan is found and kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remat.cli import session
from remat.job import pipeline
from tests.paths import ROOT
from tests.remat.cli.conftest import Remat

SOON_S = 600.0
MODEL = """
import torch
from torch import nn
def factory(batch=32768):
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())]
    loss = lambda out: out.square().mean()
    return {"model": nn.Sequential(*layers), "args": (torch.randn(batch, 256),), "loss_fn": loss}
"""
LIMITED = """
import re, resource, sys
import torch, ortools.math_opt.python.mathopt
import remat.graph_capture.capture_api, remat.rewriter.checking.check, remat.rewriter.rewriting
from remat.cli.main import main
mapped = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
most = mapped + (int(sys.argv.pop(1)) << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
main()
"""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="no /proc, or limits are not held")


def limited(folder: Path, room_mib: int, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "six.py").write_text(MODEL)
    environment = {"REMAT_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(room_mib), *words],
        check=False, capture_output=True, text=True, timeout=SOON_S, cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


@on_linux
@pytest.mark.slow
def test_with_700_mib_a_step_of_546_is_solved_at_60_percent(tmp_path: Path) -> None:
    ran = limited(tmp_path, 700, "run", "six.py", "--budget", "60%", "-o", "plan.json", "--json")
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert "more than is allocated now" in said["unchecked"], "half a GiB and copies do not fit"
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert kept["prediction"]["peak_bytes"] <= kept["schedule"]["budget_bytes"]
    assert "was not run" not in ran.stderr, "the whole step was not even tried"


@on_linux
@pytest.mark.slow
def test_a_check_without_room_is_not_run_and_the_plan_is_kept(tmp_path: Path) -> None:
    ran = limited(
        tmp_path, 450, "run", "six.py", "--budget", "60%", "-o", "plan.json", "--json", "--check"
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["unchecked"] == "memory ran out"
    kept = json.loads((tmp_path / "plan.json").read_text())
    assert kept["schedule"]
    assert (kept["check"], kept["unchecked"]) == (None, "memory ran out")


@on_linux
@pytest.mark.slow
def test_a_model_without_room_is_refused_in_a_line(tmp_path: Path) -> None:
    ran = limited(tmp_path, 30, "run", "six.py", "--no-check", "--budget", "60%")
    assert ran.returncode == session.REFUSED
    assert "can't allocate memory" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_plan_is_written_before_it_is_checked(
    remat: Remat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    found: list[bool] = []

    def checked(*_: Any) -> None:
        found.append(path.exists())
        raise MemoryError

    monkeypatch.setattr(pipeline, "check_schedule", checked)
    ran = remat("run", remat.gpt, "--budget", "80%", "-o", str(path), "--check")
    assert (ran.exit_code, found) == (0, [True])
    assert "not run       memory ran out" in ran.stdout


def test_memory_that_runs_out_elsewhere_is_one_line(
    remat: Remat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nat once")

    monkeypatch.setattr(pipeline, "trace_loaded", no_room)
    ran = remat("run", remat.gpt, "--budget", "80%")
    assert ran.exit_code == session.REFUSED
    assert "memory ran out: DefaultCPUAllocator: can't allocate memory: you tried" in ran.stderr
