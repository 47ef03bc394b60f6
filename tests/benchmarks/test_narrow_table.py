"""The table of narrow graphs: what a cell holds, and how it is shown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.narrow import solves, table
from tests.limits import AMPLE_S

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


@needs_proc
def test_a_graph_is_solved_until_its_gap_is_closed() -> None:
    cell = solves.measured(20, 1, AMPLE_S)
    assert cell["gap"] <= 1e-3
    assert cell["bound"] <= cell["overhead"] * (1 + 1e-9)
    bounds = [bound for _, _, bound in cell["course"]]
    assert bounds == sorted(bounds)


@needs_proc
def test_a_solve_ends_once_its_seconds_are_spent() -> None:
    cell = solves.measured(60, 0, 0.0)
    assert len(cell["course"]) == 1
    assert cell["overhead"] is None


def test_a_row_shows_when_the_first_schedule_came() -> None:
    cell = {
        "ops": 250, "seed": 1, "commit": "abc", "cpu_s": 60.2, "overhead": 0.03, "bound": 0.02,
        "gap": 0.0098, "course": [[0.1, None, 0.0], [4.5, 0.05, 0.01]],
    }  # fmt: skip
    none = {**cell, "seed": 0, "overhead": None, "gap": None, "course": [[0.1, None, 0.0]]}
    rows = table.lines({"250|1|now": cell, "250|0|now": none})
    assert rows[2] == "| 250 | 0 | now (abc) | 60.2 | - | - | 2.00 % | - |"
    assert rows[3] == "| 250 | 1 | now (abc) | 60.2 | 4.5 | 3.00 % | 2.00 % | 0.98 % |"


def test_the_kept_table_is_printed() -> None:
    command = [sys.executable, "-m", "benchmarks.layered", "--narrow", "--table"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    cells = json.loads(table.RESULTS.read_text())["cells"]
    assert shown.splitlines() == table.lines(cells)
    refused = subprocess.run([*command[:3], "--table"], capture_output=True, text=True)
    assert "--narrow --table" in refused.stderr
