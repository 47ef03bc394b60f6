"""`remat show` on models, graphs and plans, and `--explain`, with what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remat.schedules.plan import PlanFile
from remat.schedules.simulate import simulate
from tests.remat.cli.conftest import Remat, written
from tests.rows import each_nth

PLANNED = ("--budget", "70%", "--solver", "cut", "--time-limit", "600")
QUICK = ("--each-limit", "3")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan of the example GPT."""
    path = tmp_path_factory.mktemp("show") / "plan.json"
    written(path, "run", "--no-check", *PLANNED)
    return str(path)


def test_layers_are_folded_with_verdict_size_cost_place_and_tensor(remat: Remat, plan: str) -> None:
    shown = remat("show", plan, "--top", "300", columns=160).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "GPT, measured on cpu: peak" in lines[0]
    softmax = next(line for line in lines if line.startswith("aten._safe_softmax"))
    assert "x2" in softmax
    assert "float32 [8, 2, 32, 32] blocks.0\u20131.attn gpt.py:55" in softmax
    assert "* live at the peak" in lines


@pytest.mark.parametrize("by", ["value", "module", "op", "line"])
@pytest.mark.parametrize("columns", [60, 80, 160])
def test_every_table_fits_its_terminal(remat: Remat, plan: str, by: str, columns: int) -> None:
    done = remat("show", plan, "--by", by, columns=columns)
    assert done.exit_code == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= columns
    assert "..." in done.stdout or "\u2026" not in done.stdout


def test_a_graph_without_a_plan_has_sizes_and_no_verdicts(remat: Remat) -> None:
    done = remat("show", remat.gpt, "--by", "op", "--json")
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["peak_bytes"] == 0
    assert {value["verdict"] for value in said["values"]} == {""}
    assert sum(group["size_bytes"] for group in said["groups"]) == sum(
        value["size_bytes"] for value in said["values"]
    )
    assert "with nothing recomputed" in remat("show", remat.gpt, columns=200).stdout


def test_source_lines_are_known_for_a_device_that_is_not_here(remat: Remat) -> None:
    said = json.loads(remat("show", remat.gpt, "--device", "l4", "--json").stdout)
    lines = {value["source"].rpartition(":")[0].rpartition("/")[2] for value in said["values"]}
    assert "gpt.py" in lines


def test_only_and_at_peak_choose_values(remat: Remat, plan: str) -> None:
    words = ("show", plan, "--only", "blocks.0.attn*", "--at-peak", "--json")
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
        (["--budget", "8GiB"], "leave out --budget 8GiB, as a plan has its own"),
        (["--by", "layer"], "Invalid value for '--by'"),
    ],
)
def test_bad_input_is_refused(remat: Remat, plan: str, words: list[str], says: str) -> None:
    refused = remat("show", plan, *words, columns=200)
    assert refused.exit_code == 2
    assert says in refused.stderr


@pytest.mark.slow
def test_a_budget_that_nothing_fits_is_infeasible(remat: Remat) -> None:
    refused = remat("show", remat.gpt, "--budget", "0.1MiB")
    assert refused.exit_code == 3
    assert "try --budget" in refused.stderr
    asked = remat("show", remat.gpt, "--at-peak")
    assert asked.exit_code == 2
    assert "without a plan there is no peak" in asked.stderr


def test_files_that_are_no_plans(remat: Remat, tmp_path: Path) -> None:
    gone = remat("show", str(tmp_path / "gone.json"))
    assert gone.exit_code == 2
    assert "gone.json: No such file" in gone.stderr
    (tmp_path / "cut.json").write_text('{"kind": "remat plan", "mod')
    cut = remat("show", str(tmp_path / "cut.json"))
    assert cut.exit_code == 2
    assert "cut.json is not a graph of this release" in cut.stderr
    nowhere = tmp_path / "nowhere" / "plan.json"
    refused = remat("run", remat.gpt, *PLANNED, "-o", str(nowhere))
    assert refused.exit_code == 2
    assert "cannot write plan.json: there is no folder" in refused.stderr
    assert "solving" not in refused.stderr


@pytest.fixture(scope="module")
def said(plan: str) -> dict[str, Any]:
    done = Remat()("show", plan, "--explain", *QUICK, "--why", "blocks.0.mlp.1", "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_its_figures_are_the_simulators(plan: str, said: dict[str, Any]) -> None:
    kept = PlanFile.from_json(Path(plan).read_bytes())
    assert kept.graph is not None
    found = simulate(kept.graph, kept.schedule)
    assert said["peak_bytes"] == said["at_peak"]["peak_bytes"] == found.peak_bytes
    assert said["time_us"] == found.time_us
    assert said["overhead"] == found.overhead
    assert said["why"]
    assert said["price"]["step_bytes"] == found.peak_bytes // 20
    assert said["is_whole_gib"] is False


@pytest.mark.parametrize("columns", each_nth(2, [60, 120]))
def test_the_screen_answers_every_question(remat: Remat, plan: str, columns: int) -> None:
    done = remat("show", plan, "--explain", *QUICK, columns=columns)
    assert done.exit_code == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= columns
    shown = " ".join(done.stdout.split())
    for words in (
        "The peak is reached in", "is the lowest peak that cut knows",
        "5 % of the peak; 1 GiB would be more",
        "it saves the random stream where it stands", "best greedy (", "took why",
    ):  # fmt: skip
        assert words in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--why", "block.*"], "'block.*' matches no module, value, op or source line"),
        (["--budget", "8 gigs"], "unknown unit 'gigs'"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    remat: Remat, plan: str, words: list[str], says: str
) -> None:
    refused = remat("show", plan, "--explain", *words)
    assert refused.exit_code == 2
    assert says in refused.stderr


def test_there_must_be_a_plan_and_it_must_fit(remat: Remat) -> None:
    refused = remat("show", remat.gpt, "--explain")
    assert refused.exit_code == 2
    assert "name a plan (MODEL --plan plan.json" in refused.stderr
    lost = remat("show", remat.gpt, "--explain", "--budget", "0.1MiB", "--solver", "cut")
    assert lost.exit_code == 3
    assert "try --budget" in lost.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--explain", "--by", "op"), "leave out --by: --explain does not take it"),
        (("--why", "*", "-o", "step.dot"), "leave out -o: --explain does not take it"),
        (("--each-limit", "3"), "leave out --each-limit: the table of values does not take it"),
        (("--as", "code", "--at-peak"), "leave out --at-peak: --as code does not take it"),
        (("--as", "graph", "--budget", "60%"), "leave out --budget: --as graph does not take it"),
        (("--as", "dot"), "name the file, -o step.dot: --as dot"),
        (("--as", "code"), "name both, MODEL --plan plan.json"),
    ],
)
def test_options_of_another_form_are_refused(
    remat: Remat, words: tuple[str, ...], says: str
) -> None:
    refused = remat("show", "no_such_file.py", *words, columns=200)
    assert refused.exit_code == 2
    assert says in refused.stderr
    assert refused.stderr.count("\n") == 1
