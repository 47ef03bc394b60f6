"""Every write fails once, wherever it can: the old file stays, and one line says so."""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import remat
from remat.analysis.plan_report import report
from remat.graph_capture import files
from remat.rewriter.plans.loading import save_plan
from remat.schedules.outcome import Result
from tests.files.faults import CALLS, OLD, names_in, require_unharmed, verb
from tests.files.kinds import GRAPH, SOLVER, plan


@functools.cache
def result() -> Result:
    return remat.solve(GRAPH, "90%", solver=SOLVER)


@functools.cache
def program() -> torch.export.ExportedProgram:
    return torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))


SOLVED = ("--budget", "90%", "--solver", SOLVER)
WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "plan": ("a.json", lambda path: save_plan(plan(), path)),
    "archive": ("a.pt2", lambda path: save_plan(plan(), path)),
    "archive with a program": ("a.pt2", lambda path: save_plan(plan(), path, program())),
    "report": ("a.html", lambda path: report(GRAPH, result(), path)),
    "report of a verb": ("a.html", verb("report", "PLAN", "-o", "OUT")),
    "snapshot": ("a.pickle", verb("show", "PLAN", "-o", "OUT")),
    "trace": ("a.json", verb("show", "PLAN", "-o", "OUT")),
    "drawing": ("a.dot", verb("show", "PLAN", "-o", "OUT")),
    "schedule": ("a.json", verb("run", "GRAPH", *SOLVED, "-o", "OUT")),
    "layout": ("a.json", verb("run", "GRAPH", *SOLVED, "--layout", "OUT")),
    "front": (
        "a.json",
        verb("sweep", "GRAPH", "--budgets", "90%", "--solver", SOLVER, "-o", "OUT"),
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a graph and a plan in it."""
    (tmp_path / "graph.json").write_bytes(GRAPH.to_json())
    (tmp_path / "kept.json").write_bytes(plan().to_json())
    return tmp_path


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("name", "write"), WRITERS.values(), ids=WRITERS)
def test_a_write_that_fails_leaves_all_as_it_was(
    name: str,
    write: Callable[[Path], Any],
    call: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_unharmed(folder / name, write, call, monkeypatch)


def test_a_file_system_without_nameless_files_is_written_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, mode)

    monkeypatch.setattr(files.os, "open", refusing)
    path = tmp_path / "plan.json"
    save_plan(plan(), path)
    assert path.read_bytes() == plan().to_json() + b"\n"
    assert names_in(tmp_path) == ["plan.json"]


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(OLD)
    code = (
        "import os, signal\nfrom remat.graph_capture.files import atomic_write\n"
        f"with atomic_write({str(path)!r}) as out:\n"
        "    out.write(b'half'); out.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == OLD
    assert names_in(tmp_path) == ["plan.json"]
