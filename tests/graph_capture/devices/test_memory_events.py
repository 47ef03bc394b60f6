"""Measuring allocations beside gloo's threads, which must not write to what the profiler freed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.debug_malloc import debug_malloc
from tests.paths import ROOT

RANK = """
import os, sys
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile
from remat.graph_capture.devices import memory_events

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
x = torch.ones(8)

def reduced():
    dist.all_reduce(x, async_op=True).get_future().wait()
"""
NAMES = """
def names(results):
    return {event.name() for event in results.events()}

with profile(use_cpu=True, use_kineto=True) as torchs:
    reduced()
with memory_events._ops_profiled() as ours:
    reduced()
assert "gloo:all_reduce" in names(torchs.kineto_results)
assert "gloo:all_reduce" not in names(ours[0])
"""
MANY = """
for _ in range(20):
    assert memory_events.measure_peak(reduced) >= 0
"""
END = "sys.stdout.flush()\nos._exit(0)\n"


def run_rank(script: str, folder: Path, **variables: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "KINETO_LOG_LEVEL": "99", **variables}
    done = subprocess.run(
        [sys.executable, "-c", RANK + script + END, str(folder / "group")],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


def test_the_profiler_keeps_no_record_that_a_thread_of_gloo_ends(tmp_path: Path) -> None:
    run_rank(NAMES, tmp_path)


@pytest.mark.slow
def test_a_late_thread_of_gloo_writes_to_nothing_that_was_freed(tmp_path: Path) -> None:
    """With torch's own ``profile``, the process dies within the first few collectives."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here to delay gloo's thread with")
    late = tmp_path / "late.so"
    source = str(Path(__file__).with_name("late_gloo.cpp"))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(late), source, "-ldl"], check=True)
    run_rank(MANY, tmp_path, **debug_malloc(str(late)))
