"""The benchmark of reserved bytes: its allocators, and its tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.reserved.allocators import reserved_by, retries_by, stitched_bytes
from benchmarks.reserved.recorded import recorded, several
from benchmarks.reserved.table import one_budget_lines, recorded_lines, share_lines
from benchmarks.solvers import Results
from remat.formats import MIB
from remat.schedules.layout import Buffers
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from tests.graphs import UNLIMITED_BYTES
from tests.solver.graphs.random_graphs import gpt_like

GRAPH = gpt_like(3)


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    found = solve_within(GRAPH, UNLIMITED_BYTES, "chen_sqrt").schedule
    assert found is not None
    return found


def test_an_arena_takes_the_peak_and_no_other_less(schedule: Schedule) -> None:
    said = reserved_by(GRAPH, schedule)
    assert said["arena"] == simulate(GRAPH, schedule).peak_bytes == min(said.values())
    assert len(set(said.values())) > 2


def test_stitched_memory_loses_what_rounding_to_chunks_adds() -> None:
    apart = Buffers.of_arrays([3 * MIB, 5 * MIB, 9 * MIB], [0, 0, 1], [1, 2, 2])
    assert stitched_bytes(apart) == (6 + 10) * MIB
    small = Buffers.of_arrays([MIB, 3 * MIB], [0, 0], [1, 1])
    assert stitched_bytes(small) == (2 + 4) * MIB


def test_torchs_allocators_retry_on_a_device_of_their_own(schedule: Schedule) -> None:
    said = reserved_by(GRAPH, schedule)
    assert retries_by(GRAPH, schedule, said["arena"] - 1) == {"expandable": None, "default": None}
    most_bytes = max(said.values())
    assert retries_by(GRAPH, schedule, most_bytes) == {"expandable": 0, "default": 0}


def test_what_a_run_allocates_is_recorded_with_its_frees() -> None:
    def run() -> torch.Tensor:
        first = torch.empty(1000, dtype=torch.uint8)
        second = torch.empty(2000, dtype=torch.uint8)
        del first
        third = torch.empty(3000, dtype=torch.uint8)
        return torch.cat([second, third])

    trace = recorded(run)
    assert trace == [1000, 2000, ~0, 3000, 5000, ~2, ~1, ~3] or trace == [
        1000, 2000, ~0, 3000, 5000, ~1, ~2, ~3,
    ]  # fmt: skip
    assert several([10, 20, ~0, ~1], 2) == [10, 20, ~0, ~1, 10, 20, ~2, ~3]


def test_predicted_and_recorded_stand_side_by_side() -> None:
    pair = {"predicted": 3 * MIB, "recorded": 2 * MIB}
    said = {"step": "net", "plan": "60%", "live": pair, "default": pair, "expandable": pair}
    made = {"cpu": "a CPU", "versions": {"torch": "2"}, "date": "2026-01-01"}
    cells = recorded_lines([said], made)[-1].replace(r"\|", "/").split(" | ")
    assert cells == ["| net", "60%", "3.0 / 2.0", "3.0 / 2.0", "3.0 / 2.0 |"]


def test_the_tables_leave_out_what_is_resident(tmp_path: Path) -> None:
    results = Results(tmp_path / "none.json")
    results.graphs["net"] = {"peak_bytes": 100 * MIB, "resident_bytes": 20 * MIB}
    made = {"cpu": "a CPU", "date": "2026-01-01", "time_limit_s": 1.0, "versions": {}}
    plan = {
        "overhead": 0.1, "peak_bytes": 60 * MIB,
        "reserved_bytes": {"default": 80 * MIB, "expandable": 70 * MIB},
    }  # fmt: skip
    results.cells["net|50%"] = {**made, **plan}
    results.cells["net|25%"] = {**made, "status": "infeasible"}
    fitting = {"arena": {"percent_of_r": 98, **plan}}
    results.cells["net|one budget"] = {**made, "r_bytes": 50 * MIB, "fitting": fitting}
    assert share_lines(results)[-1] == "| net | 100 | 50 / 25 % | nothing fits |"
    first, *others = one_budget_lines(results)[-1].split(" | ")[2:]
    assert first == "10.0 % (98 %)"
    assert others == [*["none found"] * 4, "none found |"]
