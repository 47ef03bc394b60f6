"""What is measured on a GPU is measured on a CPU first: every row, and carried plans."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from benchmarks.gpu import carried, ceilings, prepare
from benchmarks.gpu.models import table_entry
from benchmarks.gpu.rows import Row, RowFile
from benchmarks.gpu.scheduler import Desk, Settings, Unit
from benchmarks.gpu.table import Steps, plan_name
from benchmarks.gpu.visit import groups_of
from remat.graph_capture.graph import Links, TrainingGraph
from remat.rewriter.tiers.file_tier import host_places
from remat.rewriter.tiers.stream_tier import StreamTier
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import Simulation
from tests.fake_cuda import FakeCuda, install
from tests.paths import ROOT
from tests.rewriter.tiers.lazy_streams import LazyMachine

EFFORT = carried.effort_of(1.0, rehearse=True)
AFTER_S = 7.0


def captured(width: int = 8) -> TrainingGraph:
    layers = [part for _ in range(6) for part in (nn.Linear(width, width), nn.Tanh())]
    return remat.capture(nn.Sequential(*layers), (torch.randn(512, width),), loss_fn=torch.sum)


def carried_into(folder: Path, budget: str = "75%") -> TrainingGraph:
    graph = captured()
    schedule = remat.solve(graph, budget, **EFFORT).schedule
    assert schedule is not None
    carried.write_plan(folder, "mlp", schedule)
    return captured()


def origin(graph: TrainingGraph, budget: str, folder: Path | None, name: str = "mlp") -> str:
    plan, row = carried.plan_for(graph, budget, name, folder, EFFORT)
    assert plan.schedule is not None
    return row["schedule"]


def test_a_carried_plan_is_taken_where_it_is_of_this_graph_and_fits(tmp_path: Path) -> None:
    graph = carried_into(tmp_path)
    assert origin(graph, "80%", tmp_path) == "carried"
    assert origin(graph, "min", tmp_path) == "carried"


def test_another_graph_file_or_budget_is_solved_anew(tmp_path: Path) -> None:
    graph = carried_into(tmp_path, "100%")
    anew = "solved here: "
    assert origin(captured(16), "80%", tmp_path) == f"{anew}it is of another graph"
    assert origin(graph, "80%", tmp_path, "gpt") == f"{anew}there is no such plan"
    assert origin(graph, "80%", None) == f"{anew}nothing was carried"
    said = origin(graph, "80%", tmp_path)
    assert said.startswith(f"{anew}it takes ")
    assert said.endswith("bytes more than the budget")
    path = tmp_path / "mlp.json"
    path.write_bytes(path.read_bytes() + b" ")
    assert origin(graph, "100%", tmp_path) == f"{anew}the file has changed"


def test_what_cannot_be_carried_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "MOST_BYTES", 1)
    with pytest.raises(SystemExit, match="name fewer models with --only"):
        prepare.prepare(tmp_path / "gpu", ["resnet-152"], rehearse=True)
    assert (tmp_path / "gpu" / ".gitignore").read_text() == "*\n"


def desk_for(folder: Path) -> Desk:
    rows = RowFile(folder / "rows.jsonl")
    return Desk(Settings(rows, time.monotonic() + 600.0, folder, rehearse=True))


@pytest.mark.slow
def test_plans_solved_for_a_gpu_of_the_table_are_of_another_graph_on_a_cpu(
    tmp_path: Path,
) -> None:
    name = "resnet-152"
    prepare.prepare(tmp_path, [name], rehearse=True)
    listed = json.loads((tmp_path / "plans" / "plans.json").read_text())
    assert plan_name(name, "plan 80%") in listed
    desk = desk_for(tmp_path)
    desk = Desk(Settings(**{**vars(desk.settings), "carried": tmp_path / "plans"}))
    row = Steps(desk, name, table_entry(name, rehearse=True))(Unit("table/plan 80%", 0.0))
    assert row["schedule"] == "solved here: it is of another graph"


@pytest.mark.slow
def test_plans_with_copies_run_over_two_streams_and_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device, on streams that run at once: the same bits and the same peak."""
    machine = LazyMachine(eager=True)
    machine.install(monkeypatch)
    # Ops of a CPU read the memory of a tensor at once, so streams have to run at once.
    monkeypatch.setattr(machine.computing, "wait_event", lambda _: machine.run())

    def tier_for(
        graph: TrainingGraph, schedule: Schedule, links: Links | None, _: Simulation
    ) -> StreamTier | None:
        if not schedule.moves:
            return None
        assert links is not None
        made = StreamTier("cpu", host_places(graph, schedule), links, 0)
        made.require_room()
        return made

    monkeypatch.setattr("remat.rewriter.compiled.tier_for", tier_for)
    steps = Steps(desk_for(tmp_path), "gpt2-medium", table_entry("gpt2-medium", rehearse=True))
    row = steps(Unit("table/plan 60% with host", 0.0))
    assert row["copied_bytes"] > 0
    assert row["gradients_equal"] == row["gradients"] > 0
    assert machine.ranges > 0


COMMAND = [sys.executable, "-u", "-m", "benchmarks.gpu", "run", "--rehearse", "--seconds", "900"]

HOW: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, "REMAT_CHECK": ""}}


def command_for(rows: RowFile) -> list[str]:
    return [*COMMAND, "--rows", str(rows.path), "--out", str(rows.path.parent / "out")]


def killed(rows: RowFile, after_s: float) -> dict[str, Row]:
    """The rows that are there once all processes were killed, so long after the first rows."""
    ran = subprocess.Popen(command_for(rows), **HOW, start_new_session=True)
    try:
        while len(rows.read()) < 3:
            assert ran.poll() is None
            time.sleep(0.05)
        time.sleep(after_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)
        ran.wait()
    return rows.read()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("after_s", [AFTER_S])
def test_a_rehearsal_that_is_killed_goes_on_where_it_stopped(
    after_s: float, tmp_path: Path
) -> None:
    rows = RowFile(tmp_path / "rows.jsonl")
    kept = killed(rows, after_s)
    ran = subprocess.run(command_for(rows), **HOW, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = rows.read()
    assert {key: found[key] for key in kept} == kept
    written = [json.loads(line)["row"] for line in rows.path.read_text().splitlines()]
    assert len(written) == len(set(written))
    assert {key: row["error"] for key, row in found.items() if "error" in row} == {}
    for group in groups_of(2, rehearse=True):
        keys = [unit.key for unit in group.units if not unit.key.startswith("visit/")]
        assert [key for key in written if key in keys] == keys
    assert written[0] == "visit/1"
    assert "visit/2" in written
    assert (tmp_path / "out" / "profiles_and_costs.tar.gz").stat().st_size > 1000


def test_rows_say_what_was_predicted_and_measured(tmp_path: Path) -> None:
    name = "resnet-152"
    steps = Steps(desk_for(tmp_path), name, table_entry(name, rehearse=True))
    unmodified = steps(Unit("table/unmodified", 0.0))
    assert unmodified["predicted_peak_bytes"] == unmodified["peak_bytes"]
    planned: dict[str, Any] = steps(Unit("table/plan 40% or min", 0.0))
    assert planned["budget"] == "min"
    assert planned["predicted_peak_bytes"] == planned["peak_bytes"] < unmodified["peak_bytes"]
    for row in (unmodified, planned):
        assert row["gradients_equal"] == row["gradients"] > 0
        assert row["gradients_of"] == "unmodified"
    assert planned["eager_us"] > 0
    assert planned["step_us"] > 0


def test_links_of_a_gpu_are_measured_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    install(fake, monkeypatch)
    empty = torch.empty

    def unpinned(*given: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        return empty(*given, **how)

    # Only memory beside a device can be pinned.
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(ceilings.pinned_memory, "SIZES", (1 << 12, 1 << 14))
    device = ceilings._Device("cpu")
    device.is_cuda = True
    row = ceilings.links(device)
    assert [one["bytes"] for one in row["copies"]] == [1 << 12, 1 << 14]
    assert row["copies"][0]["d2h_us"] == fake.device_us / ceilings.pinned_memory.REPEATS
    assert set(row["products"]) == {"alone_ms", "beside_d2h_ms", "beside_h2d_ms"}
