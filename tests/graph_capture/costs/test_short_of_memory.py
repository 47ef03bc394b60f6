"""Timing where memory runs out, or where the process is killed: what is kept, and what is not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remat.graph_capture import trace
from remat.graph_capture.costs import op_costs, op_times, step_time
from remat.graph_capture.costs.cache import CostCache
from remat.graph_capture.devices.meter import CpuMeter
from remat.graph_capture.errors import CaptureError
from tests.models import make
from tests.paths import ROOT

pytestmark = pytest.mark.usefixtures("clocked")
NO_ROOM = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
SOON_S = 600.0
KILLED = """
import os, signal
from remat.graph_capture import trace
from remat.graph_capture.devices.meter import CpuMeter
from remat.graph_capture.costs import op_costs, op_times
from tests.models import make
measured, op_times.KEEP_S, ops = CpuMeter.median_us, 0.0, []
def killed(self, run, moved_bytes=0):
    ops.append(run)
    if len(ops) > 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return measured(self, run, moved_bytes)
CpuMeter.median_us = killed
model, args, *_ = make("plain")
op_costs.measure_costs(trace(model, args))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    return tmp_path


def short_of(what: str, error: Exception) -> Callable[..., Any]:
    """`median_us` of a CPU on which one kind of op has no room."""
    measured = CpuMeter.median_us

    def median_us(meter: CpuMeter, run: Any, moved_bytes: int = 0) -> float:
        if what in repr(getattr(run, "__closure__", None) and run.__closure__[-1].cell_contents):
            raise error
        return measured(meter, run, moved_bytes)

    return median_us


@pytest.mark.parametrize("error", [RuntimeError(NO_ROOM), MemoryError()])
def test_an_op_without_room_is_estimated_and_its_cost_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    model, args, *_ = make("plain")
    traced = trace(model, args)
    with monkeypatch.context() as patched:
        patched.setattr(CpuMeter, "median_us", short_of("gelu", error))
        with pytest.warns(UserWarning, match="gelu.* was not run: memory ran out"):
            graph = op_costs.measure_costs(traced)
    assert {op.cost_origin for op in graph.ops if "gelu" in op.target} == {"estimated"}
    kept = CostCache().costs
    assert kept
    assert not any("gelu" in key for key in kept)
    assert not any(cost.is_estimate for cost in kept.values())
    again = op_costs.measure_costs(traced)
    assert {op.cost_origin for op in again.ops if "gelu" in op.target} == {"measured"}


def test_a_step_without_room_is_not_run_and_its_time_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> None:
        raise RuntimeError(NO_ROOM)

    model, args, *_ = make("plain")
    monkeypatch.setattr(step_time, "_step_input", no_room)
    with pytest.warns(UserWarning, match="the step was not run: memory ran out"):
        op_costs.measure_costs(trace(model, args))
    assert CostCache().steps == {}


def test_a_step_that_runs_out_amid_its_rounds_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> float:
        raise MemoryError

    model, args, *_ = make("plain")
    monkeypatch.setattr(CpuMeter, "step_us", no_room)
    monkeypatch.setattr(CpuMeter, "median_us", lambda *_: 1.0)
    with pytest.warns(UserWarning, match="the step was not run to its end: memory ran out"):
        op_costs.measure_costs(trace(model, args))
    assert CostCache().steps == {}


def test_ops_that_have_no_room_beside_the_profiler_end_timing_with_a_way_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> None:
        raise MemoryError

    model, args, *_ = make("plain")
    monkeypatch.setattr(CpuMeter, "regions", no_room)
    with pytest.raises(CaptureError, match="memory ran out while ops were measured"):
        op_costs.measure_costs(trace(model, args))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal")
def test_times_taken_before_a_kill_are_found_by_the_next_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED], check=False, capture_output=True, timeout=SOON_S, cwd=ROOT
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (file,) = folder.glob("*.json")
    begun = CostCache().begun
    assert sum(map(len, begun.values())) == 5, f"all but saving the state, of {file}"
    timed: list[int] = []
    measured = op_times.times_us

    def noted(*args: Any, begun: Any, **options: Any) -> Any:
        timed.append(sum(map(len, begun.values())))
        return measured(*args, begun=begun, **options)

    monkeypatch.setattr("remat.graph_capture.costs.op_costs.times_us", noted)
    model, args, *_ = make("plain")
    op_costs.measure_costs(trace(model, args))
    assert timed == [5]
    assert CostCache().begun == {}
    assert CostCache().costs.keys() >= begun.keys()
