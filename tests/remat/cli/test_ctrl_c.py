"""Ctrl-C ends each verb soon, with the best so far and whole files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remat import progress
from remat.analysis import explanation
from remat.cli.entry import ended_by_ctrl_c
from remat.cli.session import STOPPED, interrupts_noted
from remat.job import pipeline, size_search
from remat.solver.search import Progress, is_interrupted, one_job
from tests.paths import ROOT
from tests.remat.cli.conftest import Remat

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
SOON_S = 600.0
"""Sooner even on a busy machine; by itself each takes less than 2 s."""
SAID = "interrupted: this is the best that was found until then"


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, at whose call Ctrl-C comes."""

    def called(*args: Any, **options: Any) -> Any:
        ctrl_c()
        return function(*args, **options)

    return called


@pytest.mark.parametrize("check", [(), ("--no-check",)])
def test_ctrl_c_amid_the_search_keeps_and_shows_the_best(
    remat: Remat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: tuple[str, ...]
) -> None:
    text = progress.solver_text

    def once_it_has_a_schedule(budget: str, state: Progress) -> str:
        if state.best_overhead is not None:
            ctrl_c()
        return text(budget, state)

    monkeypatch.setattr(progress, "solver_text", once_it_has_a_schedule)
    monkeypatch.setattr(pipeline, "check_schedule", lambda *_: pytest.fail("was run"))
    plan = tmp_path / "plan.json"
    found = remat("run", remat.gpt, *check, "--budget", "60%", "-o", str(plan))
    assert (found.exit_code, SAID in found.stderr) == (STOPPED, True)
    assert "status" in found.stdout
    assert json.loads(plan.read_text())["schedule"]


def test_ctrl_c_before_there_is_a_schedule_says_nothing_of_the_budget(
    remat: Remat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = progress.solver_text

    def at_first(budget: str, state: Progress) -> str:
        assert state.best_overhead is None
        ctrl_c()
        return text(budget, state)

    monkeypatch.setattr(progress, "solver_text", at_first)
    plan = tmp_path / "plan.json"
    words = ("--budget", "60%", "--solver", "cut", "-o", str(plan))
    found = remat("run", remat.gpt, *words)
    assert found.exit_code == STOPPED
    no_schedule, interrupted = found.stderr.splitlines()[-2:]
    assert "was found yet: interrupted before there was one" in no_schedule
    assert "is below" not in no_schedule
    assert interrupted == "interrupted"
    assert not plan.exists()


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
    monkeypatch.setattr(pipeline, "graph_with_costs", once(pipeline.graph_with_costs))
    plan = tmp_path / "plan.json"
    found = remat("run", remat.gpt, "--budget", "80%", "-o", str(plan), "--json")
    assert found.exit_code == STOPPED
    assert found.stderr.splitlines()[-1] == "interrupted while tracing the training step"
    assert json.loads(found.stdout)["error"]["type"] == "KeyboardInterrupt"
    assert not plan.exists()


def test_ctrl_c_amid_largest_batch_gives_the_largest_so_far(
    remat: Remat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_search.FitSearch, "_guess", once(size_search.FitSearch._guess))
    found = remat("largest-batch", remat.gpt, "--budget", "1GiB", "--json")
    assert found.exit_code == STOPPED
    said = json.loads(found.stdout)
    assert said["limited_by"] == "interrupt"
    assert said["size"] == 4


def test_ctrl_c_amid_explain_shows_the_plan(remat: Remat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "least_budget", once(explanation.least_budget))
    found = remat("show", remat.gpt, "--explain", "--budget", "80%")
    assert (found.exit_code, SAID in found.stderr) == (STOPPED, True)
    assert "overhead" in found.stdout


def test_the_signal_is_python_s_again_after_a_verb(remat: Remat) -> None:
    before = signal.getsignal(signal.SIGINT)
    remat("doctor")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_amid_the_first_imports_ends_the_process_without_a_traceback() -> None:
    own = signal.getsignal(signal.SIGINT)
    with ended_by_ctrl_c():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is own
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:  # as in a job in the background
        with ended_by_ctrl_c():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, own)


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


class Interrupted:
    """Ctrl-C comes while Python lets go of it, where what is raised is dropped."""

    def __del__(self) -> None:
        ctrl_c()
        time.sleep(0)


def test_ctrl_c_that_python_dropped_comes_again(capsys: pytest.CaptureFixture[str]) -> None:
    heard = list[str]()
    with one_job(), interrupts_noted():
        Interrupted()
        heard.append("the callback has ended")
        with pytest.raises(KeyboardInterrupt):
            time.sleep(SOON_S)
    assert heard
    assert capsys.readouterr().err == ""


def test_ctrl_c_amid_the_import_of_torch_ends_a_command_that_has_nothing_yet(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model.py"
    model.write_text(
        "import os, signal, sys, types\n"
        "spec = types.SimpleNamespace(_initializing=True)\n"
        "sys.modules['torch'] = types.SimpleNamespace(__spec__=spec)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        f"open({str(tmp_path / 'went_on')!r}, 'w')\n"
    )
    code = "from remat.cli.entry import command; command()"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", str(model), "--budget", "60%"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == STOPPED
    assert done.stderr.splitlines()[-1] == f"interrupted while loading {model}"
    assert not (tmp_path / "went_on").exists()


def _ends(spec: SimpleNamespace) -> None:
    spec._initializing = False
    time.sleep(SOON_S)
