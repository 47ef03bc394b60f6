"""Solves whose process of HiGHS dies or cannot begin: only its part of the search is lost."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.backends import mip
from remat.solver.backends.mip import LATE, Limits, MixedProgram, solve_program
from remat.solver.backends.processes import end_idle, run_in_process
from tests.graphs import peak_bytes_of
from tests.killed_process import kill_the_first
from tests.limits import AMPLE_S
from tests.rows import each_nth
from tests.solver.graphs.random_graphs import gpt_like

SOON_S = 600.0


@functools.cache
def tight() -> tuple[TrainingGraph, int]:
    graph = gpt_like(3)
    return graph, int(0.7 * peak_bytes_of(graph))


def program() -> MixedProgram:
    made = MixedProgram()
    made.variable(-1.0, upper=3.0)
    return made


@pytest.mark.parametrize("solver", each_nth(2, ["auto", "cut"]))
def test_a_process_that_is_killed_costs_its_program_alone(
    monkeypatch: pytest.MonkeyPatch, solver: str
) -> None:
    graph, budget_bytes = tight()
    kill_the_first(monkeypatch)
    with pytest.warns(UserWarning, match="ended with status -9 .*the search goes on without"):
        result = solve_within(graph, budget_bytes, solver, time_limit_s=AMPLE_S)
    assert result.schedule is not None
    assert simulate(graph, result.schedule).peak_bytes <= budget_bytes


@pytest.mark.slow
def test_without_another_interpreter_a_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budget_bytes = tight()
    end_idle()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.warns(UserWarning, match="cannot start another /no/such/python for HiGHS"):
        result = solve_within(graph, budget_bytes, time_limit_s=5.0)
    assert result.schedule is not None


def test_cbc_that_dies_costs_its_program_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pulp: Any = pytest.importorskip("pulp")

    def dies(*_: Any, **__: Any) -> None:
        raise pulp.PulpSolverError("Pulp: Error while trying to execute")

    monkeypatch.setattr(pulp.LpProblem, "solve", dies)
    with pytest.warns(UserWarning, match="Error while trying to execute; the search goes on"):
        assert solve_program(program(), Limits(), backend="pulp") == LATE


@pytest.mark.parametrize("name", ["signal", "json", "queue", "subprocess", "pickle"])
def test_a_file_of_the_working_folder_does_not_enter_the_process(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("raise SystemExit('the file of the user')\n")
    begin = (
        "import sys; from remat.solver.backends.processes import run_in_process; "
        f"sys.path.insert(0, {str(tmp_path)!r}); sys.path.insert(0, ''); "
        f"import os; os.chdir({str(tmp_path)!r}); print(run_in_process(abs, -1))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", begin], check=False, capture_output=True, timeout=SOON_S
    )
    assert (ran.stdout, ran.stderr) == (b"1\n", b"")


@pytest.mark.skipif(sys.platform == "win32", reason="no groups of processes")
def test_the_process_has_a_group_of_its_own_which_ctrl_c_does_not_reach() -> None:
    assert run_in_process(os.getpgrp) not in (os.getpgrp(), 0)


_NotOkError = type("StatusNotOk", (Exception,), {})  # its name in OR-Tools


class _Failing:
    """OR-Tools where HiGHS fails so often."""

    def __init__(self, failures: int) -> None:
        from ortools.math_opt.python import mathopt

        self.api, self.left, self.asked = mathopt, failures, list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.api, name)

    def solve(self, *arguments: Any, **options: Any) -> Any:
        self.asked.append(options["params"].presolve)
        if self.left:
            self.left -= 1
            try:
                raise _NotOkError("HighsStatus: kError [INTERNAL]")
            except _NotOkError as error:
                raise AttributeError("no canonical_code") from error  # of OR-Tools 9.15
        return self.api.solve(*arguments, **options)


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_where_highs_fails_it_is_asked_without_its_presolve(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    failing = _Failing(failures)
    monkeypatch.setattr("ortools.math_opt.python.mathopt", failing)
    found = mip._with_mathopt(program(), Limits(), None)
    assert failing.asked == [None, failing.Emphasis.OFF][: failures + 1]
    assert found is LATE if failures == 2 else found.objective == -3.0
