"""Instance files: what is printed, and the sequence replayed from scratch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cells.instance_format import Instance, Node, checked, graph_of
from benchmarks.instance import History, rounded_bound
from remat.solver import Progress, solve_within
from tests.benchmarks.instances import DIAMOND, run, written
from tests.paths import BENCH

FIELDS = (
    "status", "cost", "overhead", "peak", "bound", "gap", "seconds",
    "first_feasible_seconds", "history", "solver",
)  # fmt: skip


def sequence_peak(sequence: list[Any], data: dict[str, Any]) -> int:
    """Peak of a sequence in which each use reads the latest computation before it."""
    size = {node["id"]: node["bytes"] for node in data["nodes"]}
    reads = {node: [u for u, v in data["edges"] if v == node] for node in size}
    until: list[int] = []
    latest: dict[Any, int] = {}
    for now, node in enumerate(sequence):
        for read in reads[node]:
            until[latest[read]] = now
        latest[node] = now
        until.append(now)
    assert set(latest) == set(size)
    return max(
        sum(size[sequence[i]] for i in range(now + 1) if until[i] >= now)
        for now in range(len(sequence))
    )


def test_a_recomputation_is_found_and_the_sequence_replays(tmp_path: Path) -> None:
    out = tmp_path / "sequence.json"
    done = run(written(tmp_path, DIAMOND), "--budget", 9, "--out", out)
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert set(FIELDS) <= set(found)
    assert json.loads(out.read_text()) == ["a", "b", "c", "a", "d"]
    assert (found["status"], found["cost"], found["bound"]) == ("optimal", 19, 19)
    assert isinstance(found["cost"], int)
    assert found["overhead"] == pytest.approx(2 / 17)
    assert (found["peak"], found["gap"]) == (9, 0)
    assert found["history"][-1][1:] == [19, 19]


WIDE: dict[str, Any] = {
    "nodes": [
        *({"id": f"l{i}", "cost": 2, "bytes": 8} for i in range(8)),
        *({"id": f"s{i}", "cost": 1, "bytes": 1} for i in range(8)),
        {"id": "end", "cost": 1, "bytes": 1},
    ],
    "edges": [*([f"l{i}", f"s{i}"] for i in range(8)), *([f"s{i}", "end"] for i in range(8))],
    "order": [*(f"l{i}" for i in range(8)), *(f"s{i}" for i in range(8)), "end"],
}
"""Branch by branch 16 bytes are enough; in the given order that takes recomputation."""


def test_a_free_order_saves_recomputation_and_its_sequence_replays(tmp_path: Path) -> None:
    out, path = tmp_path / "sequence.json", written(tmp_path, WIDE)
    fixed = json.loads(run(path, "--budget", 16).stdout)
    done = run(path, "--budget", 16, "--order", "free", "--out", out, "--time-limit", 10)
    free, sequence = json.loads(done.stdout), json.loads(out.read_text())
    assert done.returncode == 0
    assert fixed["cost"] > free["cost"] == 25
    assert (free["status"], free["solver"], free["gap"]) == ("optimal", "auto", 0)
    assert sorted(sequence) == sorted(WIDE["order"])
    assert sequence_peak(sequence, WIDE) == free["peak"] <= 16


def test_history_tells_the_first_schedule_and_each_better_one(tmp_path: Path) -> None:
    found = json.loads(run(written(tmp_path, WIDE), "--budget", 16).stdout)
    costs = [cost for _, cost, _ in found["history"] if cost is not None]
    bounds = [bound for _, _, bound in found["history"]]
    assert costs == sorted(costs, reverse=True)
    assert bounds == sorted(bounds)
    assert (costs[-1], bounds[-1]) == (found["cost"], found["bound"])
    first_s = next(seconds for seconds, cost, _ in found["history"] if cost is not None)
    assert found["first_feasible_seconds"] == first_s < found["seconds"]


def test_what_is_proved_to_be_needed_is_named(tmp_path: Path) -> None:
    found = json.loads(run(written(tmp_path, DIAMOND), "--budget", 8).stdout)
    assert found["least_bound"] == found["least_feasible"] == 9
    assert "No schedule has a peak below 9 bytes" in found["message"]


def test_nothing_fits(tmp_path: Path) -> None:
    done = run(written(tmp_path, DIAMOND), "--budget", 8, "--out", tmp_path / "sequence.json")
    found = json.loads(done.stdout)
    assert done.returncode == 3
    assert (found["status"], found["cost"], found["peak"]) == ("infeasible", None, None)
    assert found["first_feasible_seconds"] is None
    assert found["least_feasible"] == 9
    assert not (tmp_path / "sequence.json").exists()


def test_constants_are_apart_unless_said_to_be_resident(tmp_path: Path) -> None:
    path = written(tmp_path, {**DIAMOND, "constant_bytes": 3})
    resident = json.loads(run(path, "--budget", 12, "--constants", "resident").stdout)
    apart = json.loads(run(path, "--budget", 12).stdout)
    assert (resident["cost"], resident["peak"]) == (19, 12)
    assert (apart["cost"], apart["peak"]) == (17, 12)


def test_real_costs_stay_real_and_no_order_is_needed(tmp_path: Path) -> None:
    nodes = [{**node, "cost": node["cost"] + 0.5} for node in DIAMOND["nodes"]]
    data = {"nodes": nodes, "edges": DIAMOND["edges"]}
    found = json.loads(run(written(tmp_path, data), "--budget", 9).stdout)
    assert found["cost"] == 21.5


def test_equals_the_published_optimum(tmp_path: Path) -> None:
    if not (BENCH / "tiny_exact.json").exists():
        pytest.skip(f"the reference instances are not at {BENCH}")
    data = json.loads((BENCH / "tiny_exact.json").read_text())["graphs"][0]
    row = data["reference"]["rows"][1]
    out = tmp_path / "sequence.json"
    path = written(tmp_path, data)
    found = json.loads(run(path, "--budget", row["budget"], "--out", out).stdout)
    sequence = json.loads(out.read_text())
    cost = {node["id"]: node["cost"] for node in data["nodes"]}
    assert (found["status"], found["cost"]) == ("optimal", row["optimal_cost_fixed_order"])
    assert sum(cost[node] for node in sequence) == found["cost"]
    assert sequence_peak(sequence, data) == found["peak"] <= row["budget"]


@pytest.mark.parametrize("name", ["checkmate_test", "moccasin_fcn8", "moccasin_rl1"])
def test_memory_is_counted_as_the_files_do(name: str) -> None:
    path = BENCH / f"{name}.json"
    if not path.exists():
        pytest.skip(f"the reference instances are not at {BENCH}")
    data = json.loads(path.read_text())
    fields = {key: data[key] for key in ("edges", "order")}
    nodes = tuple(Node(node["id"], node["cost"], node["bytes"]) for node in data["nodes"])
    edges = tuple((u, v) for u, v in fields["edges"])
    graph = graph_of(checked(Instance(nodes, edges, tuple(fields["order"]))))
    kept = solve_within(graph, 1 << 60, "store_all")
    assert kept.peak_bytes == data["reference"]["no_remat_peak"]
    assert kept.time_us == data["reference"]["no_remat_cost"]


def test_history_keeps_what_is_new_only() -> None:
    instance = Instance((Node(0, 10, 1),), ())
    history = History(instance, 10.0)
    history(Progress(0.1, None, 0.0, ""))
    history(Progress(0.2, None, 0.0, ""))
    history(Progress(0.3, 0.5, 0.1, ""))
    history(Progress(0.4, 0.2, 0.2, ""))
    assert history.rows == [(0.1, None, 10), (0.3, 15, 11), (0.4, 12, 12)]
    assert history.first_feasible_seconds == 0.3


@pytest.mark.parametrize(
    ("bound", "cost", "shown"),
    [
        (45.3, 47, 46),
        (46.0000001, 47, 46),
        (46.0, None, 46),
        (48.2, 47, 47),
        (1e12 + 0.5, None, 1e12 + 0.5),
    ],
)
def test_a_bound_on_whole_costs_is_rounded_up_with_care(
    bound: float, cost: int | None, shown: float
) -> None:
    assert rounded_bound(bound, cost, whole=True) == shown
    assert rounded_bound(45.3, 47, whole=False) == 45.3
