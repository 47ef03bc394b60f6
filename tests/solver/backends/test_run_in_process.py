"""Calls in other processes: answers, errors, crashes, interrupts, and how the processes end."""

from __future__ import annotations

import _thread
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from remat.graph_capture.errors import SolverError
from remat.solver.backends import processes
from remat.solver.backends.processes import OverdueError, end_idle, ended_after, run_in_process
from tests.paths import ROOT

LONG_S = 900.0
"""So long that a test that waits it out has failed."""
SOON_S = 600.0
"""Less than that, even on a busy machine."""


def script(code: str) -> subprocess.CompletedProcess[bytes]:
    """Run `code`; over once each process that holds its standard error has ended."""
    begin = (
        "import os, signal, sys, time\nfrom remat.solver.backends.processes import run_in_process\n"
    )
    return subprocess.run(
        [sys.executable, "-c", begin + code], check=False, capture_output=True, timeout=SOON_S
    )


def test_a_call_is_answered_by_another_process_which_is_kept() -> None:
    end_idle()
    first = run_in_process(os.getpid)
    assert first != os.getpid()
    assert run_in_process(os.getpid) == first
    end_idle()
    assert run_in_process(os.getpid) != first


def test_options_are_passed_on() -> None:
    assert run_in_process(sorted, [1, 3, 2], reverse=True) == [3, 2, 1]


def test_an_error_is_raised_as_it_was_there() -> None:
    with pytest.raises(ValueError, match="invalid literal for int") as caught:
        run_in_process(int, "many")
    assert any("_answered" in note for note in caught.value.__notes__)


def test_a_crash_is_an_error_and_the_next_call_is_answered() -> None:
    with pytest.raises(SolverError, match="ended with status 3 in the middle of a program"):
        run_in_process(os._exit, 3)
    assert run_in_process(abs, -1) == 1


def test_a_process_that_ended_while_idle_is_replaced() -> None:
    run_in_process(abs, -1)
    dead = processes._idle[-1]
    dead._popen.kill()
    dead._popen.wait()
    assert run_in_process(abs, -1) == 1


def test_no_interpreter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    end_idle()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(SolverError, match="cannot start another /no/such/python for HiGHS: No"):
        run_in_process(abs, -1)


def test_what_a_call_prints_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_in_process(os.write, 1, b"HighsMipSolverData") == 18
    run_in_process(print, "said")
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_ends_the_process_at_once() -> None:
    pid = run_in_process(os.getpid)
    process = processes._idle[-1]
    threading.Timer(0.2, _thread.interrupt_main).start()
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_in_process(time.sleep, LONG_S)
    assert time.monotonic() - began_s < SOON_S
    assert (process._popen.pid, process.is_alive) == (pid, False)
    assert process not in processes._idle


def test_calls_in_threads_have_a_process_each() -> None:
    found: list[int] = []
    together = threading.Barrier(2)

    def call() -> None:
        together.wait(LONG_S)
        run_in_process(time.sleep, 0.2)
        found.append(run_in_process(os.getpid))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert len(found) == 2


def test_a_script_ends_in_order_while_a_call_is_at_work() -> None:
    began_s = time.monotonic()
    ran = script(
        "from remat.solver.backends.processes import Task\n"
        f"Task(lambda: run_in_process(time.sleep, {LONG_S}))\n"
        "time.sleep(0.5); print('the end')\n"
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"the end\n", b"")
    assert time.monotonic() - began_s < SOON_S


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
def test_a_process_ends_with_a_caller_that_is_killed() -> None:
    ran = script(
        "import threading\n"
        f"threading.Thread(target=run_in_process, args=(time.sleep, {LONG_S})).start()\n"
        "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert ran.returncode == -9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_has_processes_of_its_own() -> None:
    ran = script(
        "ours = run_in_process(os.getpid)\n"
        "child = os.fork()\n"
        "if not child: os._exit(run_in_process(os.getpid) == ours)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert run_in_process(os.getpid) == ours\n"
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "work",
    [
        "assert processes.run_in_process(os.getpid) != os.getpid()",
        "assert len(sweep_budgets(chain(8), 3, 'cut', jobs=2).points) == 3",
    ],
)
def test_a_script_without_a_guard_runs_once_where_processes_are_spawned(
    work: str, tmp_path: Path
) -> None:
    begun, path = tmp_path / "begun", tmp_path / "script.py"
    path.write_text(
        "import multiprocessing, os\n"
        f"open({str(begun)!r}, 'a').write('x')\n"
        "multiprocessing.set_start_method('spawn')\n"
        "from remat.solver.budgets.sweep import sweep_budgets\n"
        "from remat.solver.backends import processes\n"
        "from tests.solver.graphs.random_graphs import chain\n"
        f"{work}\n"
    )
    paths = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, str(path)], capture_output=True, timeout=SOON_S, env=paths, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert begun.read_text() == "x"


def test_what_takes_longer_than_it_may_is_ended_with_its_process() -> None:
    end_idle()
    process = run_in_process(os.getpid)
    with pytest.raises(OverdueError):
        run_in_process(_sleep_within, LONG_S, 0.1)
    assert run_in_process(os.getpid) != process


def test_what_ends_in_its_time_is_answered_by_a_process_that_is_kept() -> None:
    end_idle()
    process = run_in_process(os.getpid)
    assert run_in_process(_sleep_within, 0.0, SOON_S) == "slept"
    assert run_in_process(os.getpid) == process


def test_here_nothing_is_ended() -> None:
    with ended_after(0.0):
        time.sleep(0.1)


def _sleep_within(sleep_s: float, most_s: float) -> str:
    with ended_after(most_s):
        time.sleep(sleep_s)
    return "slept"
