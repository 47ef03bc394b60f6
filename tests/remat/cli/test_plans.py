"""Plans that `run -o` keeps, and the verbs that read them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from remat.job.factory import load_model
from remat.ranks.same_order import agreed_load
from remat.rewriter.plans.loading import plan_of, save_plan
from remat.schedules.plan import PlanFile
from remat.schedules.simulate import simulate
from tests.remat.cli.conftest import Remat, written

QUICK = ("--budget", "70%", "--time-limit", "600")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A plan of the example GPT, as `run -o` writes it."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    done = written(path, "run", *QUICK)
    assert f"plan written to {path}" in done.stderr
    return path.read_bytes()


@pytest.fixture
def plan(kept: bytes, tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_bytes(kept)
    return str(path)


def test_a_plan_of_run_is_read_by_every_verb_and_loaded(
    remat: Remat, plan: str, tmp_path: Path
) -> None:
    checked = remat("check", remat.gpt, plan, "--json")
    assert checked.exit_code == 0, checked.stderr
    said = json.loads(checked.stdout)
    made = PlanFile.from_json(Path(plan).read_bytes())
    assert made.prediction is not None
    assert said["plan"]["measured_peak_bytes"] <= made.prediction.peak_bytes <= made.budget_bytes
    code = tmp_path / "step.py"
    done = remat("show", remat.gpt, "--plan", plan, "--as", "code", "-o", str(code))
    assert done.exit_code == 0, done.stderr
    assert "def forward" in code.read_text()
    assert done.stdout == ""
    assert "recompute" in remat("show", plan, "--top", "500").stdout
    assert remat("show", remat.gpt, "--plan", plan).exit_code == 0
    loaded = load_model(remat.gpt)
    again = plan_of(agreed_load(plan, loaded.model, loss_fn=loaded.loss_fn))
    assert again == msgspec.structs.replace(made, check=None)  # this module was not compared


def test_what_run_proved_and_measured_is_kept(kept: bytes) -> None:
    made = PlanFile.from_json(kept)
    assert made.prediction is not None
    assert (made.prediction.status, made.prediction.order) == ("feasible", "fixed")
    assert made.check is not None
    assert made.check.gradients == made.check.gradients_total == 28
    assert made.check.equal
    assert made.check.plan_peak_bytes <= made.budget_bytes < made.check.baseline_peak_bytes
    assert min(made.check.plan_step_us, made.check.baseline_step_us) > 0
    assert made.unchecked == ""
    assert made.title


@pytest.mark.slow
def test_an_archive_is_read_as_well(remat: Remat, kept: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.pt2"
    save_plan(PlanFile.from_json(kept), path)
    assert remat("check", remat.gpt, str(path)).exit_code == 0
    assert "recompute" in remat("show", str(path), "--top", "500").stdout


def test_a_stale_plan_is_refused_with_the_first_difference(
    remat: Remat, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("GPT_BATCH", "4")
        rewritten = ("show", remat.gpt, "--plan", plan, "--as", "code")
        for words in (("check", remat.gpt, plan), rewritten):
            refused = remat(*words)
            assert refused.exit_code == 2
            assert "the plan does not fit, the batch was args[0]: int64[8, 32]" in refused.stderr
            assert "remat run MODEL --budget BUDGET -o FILE" in refused.stderr
    with monkeypatch.context() as patch:
        patch.setenv("GPT_WIDTH", "64")
        refused = remat("check", remat.gpt, plan)
        assert refused.exit_code == 2
        assert "was of shape [32, 32] and is of shape [32, 64]" in refused.stderr


def test_a_broken_plan_is_refused(remat: Remat, plan: str) -> None:
    text = json.loads(Path(plan).read_text())
    for changes, says in (
        ({"schema_version": 9}, "has schema version 9, and this release reads 1"),
        ({"versions": {"torch": "2.1.0", "remat": "0"}}, "torch was 2.1.0 and is "),
        ({"state": 3}, "is not a plan of this release"),
    ):
        Path(plan).write_text(json.dumps(text | changes))
        refused = remat("check", remat.gpt, plan)
        assert refused.exit_code == 2
        assert says in refused.stderr


def test_whole_layers_are_told_of_where_they_would_do(remat: Remat) -> None:
    words = ("run", remat.gpt, "--no-check", *QUICK, "--solver")
    said = json.loads(remat(*words, "full", "--json").stdout)
    assert said["every_n_layers"]["slower"] <= 0
    shown = " ".join(remat(*words, "full", columns=200).stdout.split())
    assert "simpler checkpointing every" in shown
    assert "comes within 1 % of this plan" in shown


@pytest.mark.slow
def test_a_plan_that_was_not_run_stands_alone_too(remat: Remat, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert remat("run", remat.gpt, "--no-check", *QUICK, "-o", str(path)).exit_code == 0
    plan = PlanFile.from_json(path.read_bytes())
    assert plan.graph is not None
    assert plan.prediction is not None
    assert plan.prediction.peak_bytes == simulate(plan.graph, plan.schedule).peak_bytes
    assert remat("check", remat.gpt, str(path)).exit_code == 0


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("show",), "values"),
        (("run", "--solver", "chen_sqrt", "--budget", "100%"), "plan"),
        (("sweep", "--solver", "chen_sqrt", "--solver", "full"), "rows"),
    ],
)
def test_a_plan_is_read_without_torch(plan: str, words: tuple[str, ...], key: str) -> None:
    code = (
        "import sys; from remat.cli.main import app; "
        "app([*sys.argv[1:], '--json'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words, plan], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[key]


def edited(text: dict[str, Any], change: str) -> dict[str, Any]:
    """A plan as someone might edit it by hand."""
    schedule, figures = dict(text["schedule"]), dict(text["prediction"])
    steps = list(schedule["steps"])
    if change == "a step is gone":
        del steps[0]
    elif change == "a step is twice":
        steps.insert(1, steps[0])
    elif change == "another peak":
        figures["peak_bytes"] -= 1
    elif change == "another overhead":
        figures["overhead"] /= 2
    elif change == "another gap":
        figures["gap"] += 0.1
    elif change == "another budget":
        schedule["budget_bytes"] = figures["peak_bytes"] - 1
    elif change == "no graph":
        return text | {"graph": None}
    elif change == "another op":
        graph = json.loads(json.dumps(text["graph"]))
        graph["ops"][3]["target"] = "aten.other.default"
        return text | {"graph": graph}
    elif change == "no such value":
        graph = json.loads(json.dumps(text["graph"]))
        graph["ops"][3]["inputs"] = ["nothing"]
        return text | {"graph": graph}
    return text | {"schedule": schedule | {"steps": steps}, "prediction": figures}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("a step is gone", "was edited, or is stale: invalid schedule at step"),
        ("a step is twice", "must not run twice|makes only values that are live already"),
        ("another peak", r"was edited, or is stale: it says peak_bytes \d+, and simulating"),
        ("another overhead", "it says overhead "),
        ("another gap", "it says gap "),
        ("another budget", r"is \d+ bytes on this graph, above its budget of"),
        ("no graph", r"MODEL --plan.*keeps no graph with costs"),
        ("another op", "was edited, or is stale: .*this plan was made for another graph, op 3"),
        ("no such value", "is not a plan of this release.*nothing"),
    ],
)
def test_an_edited_plan_is_refused_with_the_reason(
    remat: Remat, plan: str, change: str, says: str
) -> None:
    text = edited(json.loads(Path(plan).read_text()), change)
    Path(plan).write_text(json.dumps(text))
    refused = remat("show", plan)
    assert refused.exit_code == 2, refused.stdout
    assert re.search(says, refused.stderr), refused.stderr


def test_a_plan_and_a_budget_are_one_too_many(remat: Remat, plan: str) -> None:
    twice = remat("show", plan, "--plan", plan)
    assert twice.exit_code == 2
    assert "are both plans: name one" in twice.stderr
