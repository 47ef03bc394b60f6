"""A working folder with files that are named as libraries are: the command takes none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

NAMES = ("signal", "random", "ortools", "queue", "joblib", "numpy", "remat", "selectors")
MODEL = """
import torch

def factory(batch: int = 1024):
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(6)]
    return torch.nn.Sequential(*layers), (torch.ones(batch, 8),)
"""
CODE = "from remat.cli.entry import command; command()"


@pytest.mark.slow
def test_files_named_as_libraries_are_left_alone(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('the {name} of the user')")
    (tmp_path / "model.py").write_text(MODEL)
    for words in (
        ["run", "model.py", "--no-check", "--budget", "75%", "--solver", "cut", "-o", "plan.json"],
        ["sweep", "model.py", "--budgets", "75%", "--jobs", "2"],
        ["show", "plan.json"],
    ):
        # -P: an installed command has no working folder in its path either.
        done = subprocess.run(
            [sys.executable, "-P", "-c", CODE, *words],
            cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "of the user" not in done.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["schedule"]
