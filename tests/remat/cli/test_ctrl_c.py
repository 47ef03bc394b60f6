"""Ctrl-C ends each verb soon, with the best so far, whole files and no process left."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remat.cli.interrupting import interrupts_noted
from remat.cli.session import STOPPED
from remat.job import fit, pipeline
from remat.questions import explain
from remat.solver.interrupts import is_interrupted, one_job
from remat.solver.search import Progress
from tests.paths import ROOT
from tests.remat.cli.conftest import EXAMPLES, SIZES, Remat

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
SOON_S = 600.0
"""Sooner even on a busy machine; by itself each takes less than 2 s."""
QUIET_S, INTERRUPTS = 20.0, 60
SAID = "interrupted: this is the best that was found until then"
GPT = f"{EXAMPLES / 'gpt.py'}:factory"


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, at whose call Ctrl-C comes."""

    def called(*args: Any, **options: Any) -> Any:
        ctrl_c()
        return function(*args, **options)

    return called


@pytest.mark.parametrize("verb", ["run", "solve"])
def test_ctrl_c_amid_the_search_keeps_and_shows_the_best(
    remat: Remat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    text = pipeline.solver_text

    def once_it_has_a_schedule(budget: str, state: Progress) -> str:
        if state.best_overhead is not None:
            ctrl_c()
        return text(budget, state)

    monkeypatch.setattr(pipeline, "solver_text", once_it_has_a_schedule)
    monkeypatch.setattr(pipeline, "check_schedule", lambda *_: pytest.fail("was run"))
    plan = tmp_path / "plan.json"
    found = remat(verb, remat.gpt, "--budget", "60%", "-o", str(plan))
    assert (found.exit_code, SAID in found.stderr) == (STOPPED, True)
    assert "status" in found.stdout
    assert json.loads(plan.read_text())["schedule"]


def test_ctrl_c_amid_the_check_leaves_the_plan(
    remat: Remat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "check_schedule", once(pipeline.check_schedule))
    plan = tmp_path / "plan.json"
    found = remat("run", remat.gpt, "--budget", "80%", "-o", str(plan), "--check")
    assert (found.exit_code, SAID in found.stderr) == (STOPPED, True)
    assert "not run       interrupted" in found.stdout
    assert json.loads(plan.read_text())["schedule"]


def test_ctrl_c_before_there_is_anything_is_one_line(
    remat: Remat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "price_trace", once(pipeline.price_trace))
    plan = tmp_path / "plan.json"
    found = remat("solve", remat.gpt, "--budget", "80%", "-o", str(plan), "--json")
    assert found.exit_code == STOPPED
    assert found.stderr.splitlines()[-1] == "interrupted while tracing the training step"
    assert json.loads(found.stdout)["error"]["type"] == "KeyboardInterrupt"
    assert not plan.exists()


def test_ctrl_c_amid_fit_gives_the_largest_so_far(
    remat: Remat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit.FitSearch, "_guess", once(fit.FitSearch._guess))
    found = remat("fit", remat.gpt, "--budget", "1GiB", "--json")
    assert found.exit_code == STOPPED
    said = json.loads(found.stdout)
    assert said["limited_by"] == "interrupt"
    assert said["size"] == 4


def test_ctrl_c_amid_explain_shows_the_plan(remat: Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "least_budget", once(explain.least_budget))
    found = remat("explain", remat.gpt, "--budget", "80%")
    assert (found.exit_code, SAID in found.stderr) == (STOPPED, True)
    assert "overhead" in found.stdout


def test_the_signal_is_python_s_again_after_a_verb(remat: Remat) -> None:
    before = signal.getsignal(signal.SIGINT)
    remat("doctor")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_amid_the_import_of_torch_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, heard = SimpleNamespace(_initializing=True), list[str]()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__spec__=spec))
    with one_job(), interrupts_noted():
        ctrl_c()
        heard.append("import goes on")
        assert is_interrupted()
        with pytest.raises(KeyboardInterrupt):
            _ends(spec)
    assert heard


def _ends(spec: SimpleNamespace) -> None:
    spec._initializing = False
    time.sleep(SOON_S)


def verbs(graph: Path) -> list[list[str]]:
    kept, name = ["-o", "out.json"], str(graph)
    return [
        ["run", GPT, "--budget", "55%", *kept],
        ["solve", name, "--budget", "55%", *kept],
        ["solve", name, "--budget", "min", *kept],
        ["sweep", name, *kept],
        ["sweep", name, "--jobs", "2", *kept],
        ["compare", name],
        ["fit", GPT, "--budget", "200MiB", *kept],
        ["explain", name, "--budget", "55%"],
    ]


def none_is_left(folder: Path) -> bool:
    """Whether no process that began in `folder` is there after a while."""
    until_s = time.monotonic() + QUIET_S
    while any(_folder_of(one) == folder for one in Path("/proc").glob("[0-9]*")):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


def _folder_of(process: Path) -> Path | None:
    try:
        return (process / "cwd").readlink()
    except OSError:  # it has ended, or is not ours
        return None


def python_m(*words: str, cwd: Path) -> subprocess.Popen[str]:
    size = {f"GPT_{name}": value for name, value in SIZES.items()}
    return subprocess.Popen(
        [sys.executable, "-m", "remat", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
        env={**os.environ, **size, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.clock
@pytest.mark.skipif(sys.platform != "linux", reason="no /proc to find processes in")
def test_sixty_random_interrupts(tmp_path: Path) -> None:
    source, graph = random.Random(0), tmp_path / "graph.json"
    capture = python_m("capture", str(EXAMPLES / "unet.py"), "-o", str(graph), cwd=tmp_path)
    assert capture.wait(SOON_S) == 0
    every = verbs(graph)
    for number in range(INTERRUPTS):
        words = every[number % len(every)]
        folder = tmp_path / str(number)
        folder.mkdir()
        process = python_m(*words, cwd=folder)
        assert process.stderr is not None
        process.stderr.readline()  # it is at work
        time.sleep(source.choice([0.0, 0.3, 1.0, 2.0, 4.0]) * source.random())
        began_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=SOON_S)
        took_s = time.monotonic() - began_s
        place = f"{number}: {words}: {took_s:.1f} s: {said}"
        assert took_s < QUIET_S, place
        assert process.returncode in (0, STOPPED), place
        assert "Traceback" not in said, place
        assert none_is_left(folder), place
        for file in folder.iterdir():
            assert json.loads(file.read_text()), place
