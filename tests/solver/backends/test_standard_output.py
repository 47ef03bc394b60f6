"""A process that solves keeps its standard output and ends in order, also after Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.limits import AMPLE_S

AT_WORK = """
import sys

import pytest
from benchmarks.layered import layered_graph
from remat.solver import solve_within
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S

def tell(progress):
    if "neighbourhoods" in progress.doing:
        print("searching", file=sys.stderr, flush=True)

graph = layered_graph(150, 0, by_layers=True)
budget_bytes = peak_bytes_of(graph) * 90 // 100
result = solve_within(graph, budget_bytes, gap=0.0, time_limit_s=AMPLE_S, progress=tell)
print(result.status, result.schedule is not None, result.message)
"""

IN_THREADS = """
import threading
from remat.solver import solve_within
from tests.solver.graphs.random_graphs import resnet_like
from tests.graphs import peak_bytes_of

graph = resnet_like(3)
budget_bytes = peak_bytes_of(graph) * 6 // 10
threads = [
    threading.Thread(target=solve_within, args=(graph, budget_bytes - i, "cut")) for i in range(4)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("the end")
"""

LISTENING = """
import sys

import pytest
from remat.solver import solve_within
from tests.limits import AMPLE_S
from tests.solver.layered_search import GAP, budget_bytes, layered

def tell(progress):
    print(progress.doing, flush=True)
    print(progress.doing, file=sys.stderr, flush=True)

solve_within(layered(), budget_bytes(), gap=GAP, time_limit_s=AMPLE_S, progress=tell)
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_search_around_with_the_best_found() -> None:
    """A thread still in C++ when the interpreter ends can abort it; the status says no."""
    with subprocess.Popen(
        [sys.executable, "-c", AT_WORK],
        env={"PYTHONPATH": "."},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None
        for _ in range(3):
            assert running.stderr.readline() == "searching\n"
        running.send_signal(signal.SIGINT)
        said, complaints = running.communicate(timeout=AMPLE_S)
    assert running.returncode == 0, complaints
    assert said.startswith("time limit True interrupted"), "the output after the solve is lost"


@pytest.mark.slow
def test_solves_in_threads_leave_standard_output_as_it_was() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IN_THREADS],
        env={"PYTHONPATH": "."}, check=True, capture_output=True, timeout=AMPLE_S,
    )  # fmt: skip
    assert ran.stdout == b"the end\n"


def test_what_a_listener_prints_is_not_lost() -> None:
    """The cuts are solved in another thread while the listener hears of neighbourhoods."""
    ran = subprocess.run(
        [sys.executable, "-c", LISTENING],
        env={"PYTHONPATH": "."}, check=True, capture_output=True, timeout=AMPLE_S,
    )  # fmt: skip
    assert b"neighbourhoods" in ran.stderr
    assert ran.stdout == ran.stderr
