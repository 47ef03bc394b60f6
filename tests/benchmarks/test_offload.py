"""The benchmark of copies: its figures are the simulator's, and what is missing is said."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.offload import __main__ as command
from benchmarks.offload.cells import (
    PLANNERS,
    budget_of,
    judged_facts,
    plan_cell,
    planned,
    size_facts,
    slower_cell,
    sweep_cell,
)
from benchmarks.offload.steps import DEEP_NAMES, NAMES, link_gb_s, links, step
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import simulate
from tests.graphs import peak_bytes_of
from tests.solver.graphs.random_graphs import chain, gpt_like

LIMIT_S = 600.0


@pytest.fixture
def graph() -> TrainingGraph:
    return msgspec.structs.replace(gpt_like(2), name="gpt15-h100", links=links(51.2))


def test_links_are_a_share_of_what_the_maker_states() -> None:
    assert link_gb_s("h100") == pytest.approx(51.2)
    assert link_gb_s("rtx4090") == pytest.approx(25.6)
    assert len(NAMES) == 8


def test_budgets_lie_between_the_floor_and_the_peak(graph: TrainingGraph) -> None:
    facts = size_facts(graph)
    assert facts["peak_bytes"] == peak_bytes_of(graph)
    assert budget_of(facts, 0.0) == facts["floor_bytes"] < budget_of(facts, 0.5)
    assert budget_of(facts, 1.0) == facts["peak_bytes"]


def test_every_figure_of_a_cell_is_the_judges(graph: TrainingGraph) -> None:
    budget_bytes = budget_of(size_facts(graph), 0.3)
    cell = plan_cell(graph, budget_bytes, "delta", LIMIT_S)
    schedule = planned(graph, budget_bytes, "delta", LIMIT_S).schedule
    assert schedule is not None
    found = simulate(graph, schedule)
    assert cell["overhead"] == found.overhead
    assert cell["peak_bytes"] == found.peak_bytes <= budget_bytes
    assert cell["hosted_bytes"] == found.moved_bytes["d2h"] > 0
    lost = plan_cell(graph, 1, "swap_all", LIMIT_S)
    assert (lost["overhead"], lost["status"]) == (None, "none found")


def test_a_slower_link_costs_time_and_no_byte(graph: TrainingGraph) -> None:
    budget_bytes = budget_of(size_facts(graph), 0.3)
    cell = slower_cell(graph, budget_bytes, "delta", 1.0, LIMIT_S)
    overheads = [cell["judged"][share]["overhead"] for share in ("1.0", "0.95", "0.9", "0.8")]
    assert overheads == sorted(overheads)
    assert len({one["peak_bytes"] for one in cell["judged"].values()}) == 1
    slow, fast = (
        sweep_cell(graph, budget_bytes, "delta", gb_s, LIMIT_S)["overhead"] for gb_s in (1.0, 200.0)
    )
    assert fast < slow
    schedule = planned(graph, budget_bytes, "delta", LIMIT_S).schedule
    assert schedule is not None
    assert judged_facts(graph, schedule, None)["overhead"] == overheads[0]


def test_a_run_keeps_its_cells_and_says_which_planner_is_missing(
    graph: TrainingGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "step", lambda name: graph)
    monkeypatch.setattr(command, "is_here", lambda name: name != "joint")
    out = tmp_path / "found.json"
    asked = ["--graphs", "gpt15-h100", "--planners", "swap_all", "fraction", "joint",
             "--fractions", ".3", "--rates", "4", "--out", str(out)]  # fmt: skip
    assert command.main(asked) == 0
    said = capsys.readouterr().out
    assert "joint: this release has no such solver, so its columns are left out" in said
    assert "| gpt15-h100 | " in said
    kept = json.loads(out.read_text())
    assert command.BEST == ("joint", "delta")
    assert [key.split("|")[3] for key in kept["cells"]][-4:] == ["fraction"] * 4
    keys = [key.split("|")[0] for key in kept["cells"]]
    assert keys == ["plan", "plan", "sweep", "slower", "slower", "slower"]
    for cell in kept["cells"].values():
        assert {"cpu", "versions", "commit", "date"} <= cell.keys()
    before = out.read_text()
    assert command.main(asked) == 0
    assert out.read_text() == before
    assert command.main(["--planners", "joint", "--out", str(out)]) == 1


def test_first_plans_of_deep_steps_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = msgspec.structs.replace(chain(6), links=links(51.2))
    monkeypatch.setattr(command, "step", lambda name: msgspec.structs.replace(graph, name=name))
    out = tmp_path / "found.json"
    assert command.main(["--parts", "first", "--out", str(out)]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert list(cells) == [f"first|{name}|0.3|joint" for name in DEEP_NAMES]
    assert all(0 < cell["first_s"] <= cell["seconds"] for cell in cells.values())
    assert "| gpt167-h100 | " in capsys.readouterr().out


def test_a_graph_in_a_file_is_planned_with_the_links_of_its_device(
    graph: TrainingGraph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine-rtx4090.json"
    path.write_bytes(msgspec.structs.replace(graph, links=None).to_json())
    found = step(str(path))
    assert (found.name, found.links) == ("mine-rtx4090", links(link_gb_s("rtx4090")))
    asked = ["--graphs", str(path), "--planners", "swap_all", "--parts", "table"]
    assert command.main([*asked, "--fractions", ".3", "--out", str(tmp_path / "found.json")]) == 0
    assert "| mine-rtx4090 | " in capsys.readouterr().out
    path.write_text("{")
    said = (
        "mine-rtx4090.json: .*remat show MODEL --as graph -o FILE.*is not a graph of this release"
    )
    with pytest.raises(SystemExit, match=said):
        command.main([*asked, "--out", str(tmp_path / "found.json")])
    path.rename(path.with_name("mine.json"))
    with pytest.raises(SystemExit):
        command.main(["--graphs", str(path.with_name("mine.json"))])
    assert "mine.json is no MODEL-DEVICE.json: no device ''" in capsys.readouterr().err


def test_what_cannot_be_asked_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for asked in (["--graphs", "none"], ["--planners", "none"], ["--time-limit", "0"]):
        with pytest.raises(SystemExit):
            command.main(asked)
    assert "--time-limit and --rates must be positive" in capsys.readouterr().err
    assert PLANNERS[0] == "recompute"
