"""`remat inspect` on models, graphs and plans, and what it does with bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.remat.cli.conftest import Remat, written

PLANNED = ("--budget", "70%", "--solver", "cut", "--time-limit", "600")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan of the example GPT."""
    path = tmp_path_factory.mktemp("inspect") / "plan.json"
    written(path, "solve", *PLANNED)
    return str(path)


def test_layers_are_folded_with_verdict_size_cost_place_and_tensor(remat: Remat, plan: str) -> None:
    shown = remat("inspect", plan, "--top", "300", columns=160).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "GPT, measured on cpu: peak" in lines[0]
    softmax = next(line for line in lines if line.startswith("aten._safe_softmax"))
    assert "x2" in softmax
    assert "float32 [8, 2, 32, 32] blocks.0\u20131.attn gpt.py:55" in softmax
    assert "* live at the peak" in lines


@pytest.mark.parametrize("by", ["value", "module", "op", "line"])
@pytest.mark.parametrize("columns", [60, 80, 160])
def test_every_table_fits_its_terminal(remat: Remat, plan: str, by: str, columns: int) -> None:
    done = remat("inspect", plan, "--by", by, columns=columns)
    assert done.exit_code == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= columns
    assert "..." in done.stdout or "\u2026" not in done.stdout


def test_a_graph_without_a_plan_has_sizes_and_no_verdicts(remat: Remat) -> None:
    done = remat("inspect", remat.gpt, "--by", "op", "--json")
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["peak_bytes"] == 0
    assert {value["verdict"] for value in said["values"]} == {""}
    assert sum(group["size_bytes"] for group in said["groups"]) == sum(
        value["size_bytes"] for value in said["values"]
    )
    assert "with nothing recomputed" in remat("inspect", remat.gpt, columns=200).stdout


def test_source_lines_are_known_for_a_device_that_is_not_here(remat: Remat) -> None:
    said = json.loads(remat("inspect", remat.gpt, "--device", "l4", "--json").stdout)
    lines = {value["source"].rpartition(":")[0].rpartition("/")[2] for value in said["values"]}
    assert "gpt.py" in lines


def test_only_and_at_peak_choose_values(remat: Remat, plan: str) -> None:
    words = ("inspect", plan, "--only", "blocks.0.attn*", "--at-peak", "--json")
    said = json.loads(remat(*words).stdout)
    assert said["values"]
    assert {value["module"].split(".")[1] for value in said["values"]} == {"0"}
    assert all(value["at_peak"] for value in said["values"])
    held = {name for row in said["at_peak"]["values"] for name in row["values"]}
    assert {value["value"] for value in said["values"]} <= held


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--only", "block.*"], "'block.*' matches no module, value, op or source line"),
        (["--budget", "8 gigs"], "unknown unit 'gigs': write 8MiB or 8GiB"),
        (["--budget", "8GiB"], "a plan has its budget: leave out --budget 8GiB"),
        (["--by", "layer"], "Invalid value for '--by'"),
    ],
)
def test_bad_input_is_refused(remat: Remat, plan: str, words: list[str], says: str) -> None:
    refused = remat("inspect", plan, *words, columns=200)
    assert refused.exit_code == 2
    assert says in refused.stderr


@pytest.mark.slow
def test_a_budget_that_nothing_fits_is_infeasible(remat: Remat) -> None:
    refused = remat("inspect", remat.gpt, "--budget", "0.1MiB")
    assert refused.exit_code == 3
    assert "Try --budget" in refused.stderr
    asked = remat("inspect", remat.gpt, "--at-peak")
    assert asked.exit_code == 2
    assert "without a plan there is no peak" in asked.stderr


def test_files_that_are_no_plans(remat: Remat, tmp_path: Path) -> None:
    gone = remat("inspect", str(tmp_path / "gone.json"))
    assert gone.exit_code == 2
    assert "gone.json: No such file" in gone.stderr
    (tmp_path / "cut.json").write_text('{"kind": "remat plan", "mod')
    cut = remat("inspect", str(tmp_path / "cut.json"))
    assert cut.exit_code == 2
    assert "cut.json is no graph and no plan, or is cut short: not a JSON" in cut.stderr
    nowhere = tmp_path / "nowhere" / "plan.json"
    for verb in ("run", "solve"):
        refused = remat(verb, remat.gpt, *PLANNED, "-o", str(nowhere))
        assert refused.exit_code == 2
        assert "nowhere: No such folder, so plan.json cannot be written" in refused.stderr
        assert "solving" not in refused.stderr
