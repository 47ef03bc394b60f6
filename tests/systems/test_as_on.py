"""The main job on Windows and macOS, as far as Linux can look like them: same plan, same check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

DEMO = "examples/gpt.py:factory"
"""The model of `make demo`."""
SYSTEMS = pytest.mark.parametrize(
    "system", ["windows", pytest.param("darwin", marks=pytest.mark.slow)]
)
SMALL = """
import torch

torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(6)]
model, batch = torch.nn.Sequential(*layers), torch.randn(512, 16)
target, loss_fn = torch.randn(512, 16), torch.nn.functional.mse_loss
"""


def as_on(system: str, *words: str, warnings: str = "ignore") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", warnings, "-m", "tests.systems.as_on", system, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@cache
def planned(system: str, model: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The plan that is made there, and what is said of its check."""
    kept = folder / f"{system}.json"
    kept.write_bytes(b"an old plan")  # which has a mode, and is replaced
    done = as_on(system, "run", model, "--budget", "60%", "-o", str(kept))
    assert done.returncode == 0, done.stderr
    plan = json.loads(kept.read_bytes())
    assert [one.name for one in folder.glob(f"*{system}*")] == [kept.name]
    # What the processor is called is not the plan's matter.
    plan.pop("title")
    plan["graph"]["versions"].pop("priced_on", None)
    checked = [line for line in done.stdout.splitlines() if "bit-identical" in line]
    return plan, checked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    (folder / "small.py").write_text(SMALL)
    return folder


@SYSTEMS
@pytest.mark.parametrize("model", ["small", pytest.param("demo", marks=pytest.mark.slow)])
def test_the_plan_and_its_check_are_those_of_linux(model: str, system: str, folder: Path) -> None:
    named = DEMO if model == "demo" else str(folder / "small.py")
    there, here = (planned(one, named, folder) for one in (system, "linux"))
    assert there == here
    (said,) = here[1]
    assert said.startswith("equal")


@SYSTEMS
def test_the_doctor_knows_what_is_free_and_that_no_values_go_to_files(system: str) -> None:
    done = as_on(system, "doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["free_bytes"] == 4 << 30
    assert found["host_folder"] is None


def test_a_host_of_files_is_refused_before_the_model_is_loaded() -> None:
    done = as_on("windows", "run", "no_such_model.py", "--host", "1GiB")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "plan without host: it keeps values in files, which only works on Linux "
    )


def test_nothing_of_ours_is_hidden_in_vain() -> None:
    """The names are those of this Python, so that what they hide is hidden."""
    code = (
        "import mmap, os, signal\n"
        "from tests.systems import as_on\n"
        "there = {*dir(os), *dir(signal), *dir(mmap)}\n"
        "print(sorted(set().union(*as_on.HIDDEN.values()) - there))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout == "[]\n"
