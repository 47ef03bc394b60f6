from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from remat import __version__, checks, progress
from remat.cli.main import FORMER, VERBS
from remat.job import pipeline
from remat.job.request import Request
from remat.solver import Progress
from tests.remat.cli.conftest import Remat

QUICK = ("--time-limit", "600")


def test_run_prints_one_object_with_all_that_is_promised(remat: Remat) -> None:
    done = remat("run", remat.gpt, "--budget", "70%", *QUICK, "--json")
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["status"] in ("optimal", "feasible", "time limit")
    assert said["solver"]
    assert said["plan"]["measured_peak_bytes"] <= said["budget_bytes"]
    assert said["plan"]["predicted_peak_bytes"] <= said["budget_bytes"]
    assert said["plan"]["overhead"] >= said["bound"]["overhead"] >= 0
    assert said["bound"]["gap"] >= 0
    baseline = said["baseline"]
    assert min(baseline["predicted_peak_bytes"], baseline["measured_peak_bytes"]) > 0
    checked = said["check"]
    assert all(checked[f"{name}_equal"] for name in ("outputs", "gradients", "buffers", "rng"))
    assert checked["gradients"] == checked["gradients_total"] > 0
    named = {"start", "load", "capture", "profile", "solve", "check", "other"}
    assert named <= said["seconds"].keys()
    assert said["seconds"]["other"] < 0.1 * sum(said["seconds"].values())
    # Square roots are measured on request alone.
    assert said["chen_sqrt"]["predicted_peak_bytes"] > 0
    assert said["chen_sqrt"]["measured_peak_bytes"] is None


def test_run_compares_with_square_roots_if_asked(remat: Remat) -> None:
    done = remat("run", remat.gpt, "--budget", "70%", *QUICK, "--compare", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["chen_sqrt"]["measured_peak_bytes"] > 0


def test_a_gap_is_asked_for_on_the_command_line(remat: Remat) -> None:
    words = ("run", remat.gpt, "--budget", "70%", *QUICK, "--device", "l4", "--json")
    wide, narrow = (
        json.loads(remat(*words, "--gap", gap).stdout)["bound"]["gap"] for gap in ("0.5", "0.001")
    )
    assert narrow <= 0.001 < wide <= 0.5
    refused = remat(*words, "--gap", "-1")
    assert refused.exit_code == 2
    assert "--gap" in refused.stderr


@pytest.mark.slow
def test_what_does_not_fit_into_memory_is_planned_and_not_run(
    remat: Remat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "auto_bytes", lambda _: 0)
    words = ("run", remat.gpt, "--budget", "70%", *QUICK)
    found = remat(*words)
    assert found.exit_code == 0
    assert "not checked against the unmodified step, which needs" in " ".join(found.stdout.split())
    assert remat(*words, "--check").stdout.count("bit-identical") == 1


def test_run_prints_a_screen_of_sixty_columns(remat: Remat) -> None:
    done = remat("run", remat.gpt, "--budget", "70%", *QUICK, columns=60)
    assert done.exit_code == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 60
    for words in ("unmodified", "square-root", "this plan", "lower bound", "peak held by"):
        assert words in done.stdout
    assert "gradients bit-identical" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_what_runs_again_is_said_and_that_attention_does_not(remat: Remat) -> None:
    words = ("run", remat.gpt, "--no-check", "--budget", "70%", *QUICK)
    said = json.loads(remat(*words, "--json").stdout)
    assert said["attention"]["outputs"] == 2
    assert said["attention"]["says"] in (
        "keeps all 2 attention outputs", "recomputes 1 of 2 attention outputs",
        "recomputes 2 of 2 attention outputs",
    )  # fmt: skip
    assert said["recomputed"][0]["recomputed"] > 0
    assert {"kind", "ops", "recomputed", "recomputed_us"} == set(said["recomputed"][0])
    assert said["floor"] is None
    shown = " ".join(remat(*words, columns=200).stdout.split())
    assert " attention outputs" in shown
    assert f"recomputed {said['recomputed'][0]['kind']} " in shown


@pytest.mark.slow
def test_run_says_what_runs_again(remat: Remat) -> None:
    words = ("run", remat.gpt, "--budget", "70%", *QUICK)
    said = json.loads(remat(*words, "--json").stdout)
    assert said["attention"]["says"].endswith("attention outputs")
    assert isinstance(said["message"], str)
    shown = " ".join(remat(*words, columns=200).stdout.split())
    assert said["attention"]["says"].split()[0] in shown
    assert " attention outputs" in shown


@pytest.mark.slow
def test_a_free_order_is_an_option_of_run(remat: Remat) -> None:
    for check in ("--check", "--no-check"):
        done = remat(
            "run", remat.gpt, check, "--budget", "70%", *QUICK, "--order", "free", "--json"
        )
        assert done.exit_code == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["solver"] == "auto"
        assert said["bound"]["gap"] >= 0
    refused = remat("run", remat.gpt, "--order", "free", "--solver", "cut")
    assert refused.exit_code == 2
    assert "solver 'cut' keeps the given order" in refused.stderr
    assert "use solver auto" in refused.stderr
    assert remat("run", remat.gpt, "--order", "any").exit_code == 2


def test_best_bound_and_gap_are_shown_while_it_solves() -> None:
    known = progress.solver_text("2GiB", Progress(1.0, 0.20, 0.125, "cuts"))
    assert known == "solving for 2GiB: best 20.0 %, bound 12.5 %, gap 6.7 %, cuts"
    start = progress.solver_text("60%", Progress(0.1, None, 0.0, "choosing where to cut"))
    assert "best none, bound 0.0 %, gap open, choosing" in start


def test_a_kept_plan_is_checked_rewritten_and_inspected(remat: Remat, tmp_path: Path) -> None:
    graph, plan = str(tmp_path / "graph.json"), str(tmp_path / "plan.json")
    assert remat("show", remat.gpt, "--as", "graph", "-o", graph).exit_code == 0
    solved = remat("run", graph, "--budget", "70%", *QUICK, "-o", plan, "--json")
    assert solved.exit_code == 0
    assert json.loads(solved.stdout)["bound"]["gap"] >= 0
    checked = remat("check", remat.gpt, plan, "--json")
    assert checked.exit_code == 0, checked.stderr
    assert json.loads(checked.stdout)["check"]["gradients_equal"]
    rewritten = remat("show", remat.gpt, "--plan", plan, "--as", "code")
    assert rewritten.exit_code == 0, rewritten.stderr
    assert "def forward" in rewritten.stdout
    values = json.loads(remat("show", graph, "--plan", plan, "--json").stdout)["values"]
    assert any(value["verdict"] == "recompute" for value in values)
    assert "blocks.0\u20131.attn" in remat("show", graph, "--top", "100", columns=200).stdout
    alone = remat("show", plan)
    assert alone.exit_code == 2
    assert "is only a schedule, without sizes and costs" in alone.stderr


@pytest.mark.slow
def test_a_stale_plan_is_refused_with_the_first_difference(
    remat: Remat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = str(tmp_path / "plan.json")
    assert (
        remat("run", remat.gpt, "--no-check", "--budget", "70%", *QUICK, "-o", plan).exit_code == 0
    )
    monkeypatch.setenv("GPT_BATCH", "4")
    for words in (("check", remat.gpt, plan), ("show", remat.gpt, "--plan", plan, "--as", "code")):
        refused = remat(*words)
        assert refused.exit_code == 2
        assert "the plan does not fit, the batch was" in refused.stderr
    shown = remat("show", remat.gpt, "--plan", plan)
    assert shown.exit_code == 2
    assert "this plan was made for another graph, input 0 was" in shown.stderr


def test_infeasible_names_the_least_and_what_holds_it(remat: Remat) -> None:
    refused = remat("run", remat.gpt, "--budget", "0.1MiB")
    assert refused.exit_code == 3
    assert "is below" in refused.stderr
    assert "That peak is held by resident" in refused.stderr
    assert "try --budget" in refused.stderr
    said = json.loads(remat("run", remat.gpt, "--budget", "0.1MiB", "--json").stdout)
    assert said["status"] == "infeasible"
    assert said["least_feasible_bytes"] > said["budget_bytes"]
    assert "try --budget" in said["error"]["message"]


@pytest.mark.slow
def test_the_least_budget_is_met(remat: Remat) -> None:
    words = ("run", remat.gpt, "--no-check", "--budget", "min", *QUICK, "--json")
    said = json.loads(remat(*words).stdout)
    assert said["plan"]["predicted_peak_bytes"] <= said["budget_bytes"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--budget", "60"], "60 bytes? Write 60%, 60MiB or 60GiB"),
        (["--budget", "70%", "--solver", "cutt"], "unknown solver 'cutt': did you mean cut?"),
    ],
)
def test_refusals_come_before_anything_runs(remat: Remat, words: list[str], says: str) -> None:
    refused = remat("run", "no_such_file.py:factory", *words)
    assert refused.exit_code == 2
    assert says in refused.stderr
    said = json.loads(remat("run", "no_such_file.py:factory", *words, "--json").stdout)
    assert says in said["error"]["message"]


def test_a_missing_factory_and_a_missing_plan(remat: Remat, tmp_path: Path) -> None:
    refused = remat("run", f"{remat.gpt}s", "--budget", "60%")
    assert refused.exit_code == 2
    assert "Did you mean" in refused.stderr
    gone = remat("check", remat.gpt, str(tmp_path / "gone.json"))
    assert gone.exit_code == 2
    assert "gone.json: No such file" in gone.stderr
    (tmp_path / "half.json").write_text('{"steps":')
    half = remat("check", remat.gpt, str(tmp_path / "half.json"))
    assert half.exit_code == 2
    assert "is not a plan of this release" in half.stderr


DATA_DEPENDENT = """
import torch

class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            y = -y
        return y.sum()

def factory():
    print("a model may print")
    return Branches(), (torch.ones(1, 2),)
"""


def test_a_data_dependent_branch_is_refused_with_its_line(remat: Remat, tmp_path: Path) -> None:
    path = tmp_path / "branches.py"
    path.write_text(DATA_DEPENDENT)
    refused = remat("run", f"{path}:factory", "--budget", "60%", "--json")
    assert refused.exit_code == 2
    said = json.loads(refused.stdout)["error"]
    assert said["type"] == "CaptureError"
    line = DATA_DEPENDENT.splitlines().index("        if y.sum() > 0:") + 1
    assert f"branches.py:{line}" in said["message"]
    assert "a model may print" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gradients_equal": False}, "gradients differ from eager's"),
        ({"plan_peak_bytes": 2**40}, "exceeds the budget"),
    ],
)
def test_a_failed_check_ends_with_four(
    remat: Remat, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    real = pipeline.check_schedule

    def spoiled(*words: Any) -> Any:
        return msgspec.structs.replace(real(*words), **changes)

    monkeypatch.setattr(pipeline, "check_schedule", spoiled)
    failed = remat("run", remat.gpt, "--budget", "70%", *QUICK)
    assert failed.exit_code == 4
    assert says in failed.stderr


@pytest.mark.parametrize("former", FORMER)
def test_a_verb_of_an_older_release_names_the_one_of_today(remat: Remat, former: str) -> None:
    refused = remat(former, "model.py", "--budget", "60%")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == f"{former} is now: remat {FORMER[former]}\n"
    assert FORMER[former].split()[0] in VERBS
    assert former not in VERBS


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rum", "model.py"], "No such command 'rum'. Did you mean 'run'?"),
        (["run", "model.py", "--shard", "ddp"], "No such option: --shard"),
        (["run"], "Missing argument 'MODEL|GRAPH|PLAN'"),
        (
            ["check", "plan.json", "model.py"],
            "name the model first, as path/to/file.py: plan.json is a kept file",
        ),
        (
            ["largest-batch", "plan.json", "--budget", "1GiB"],
            "name the model first, as path/to/file.py: plan.json is a kept file",
        ),
        (
            ["run", "graph.json", "--compare"],
            "leave out --compare, or name a model: graph.json has none",
        ),
    ],
)
def test_wrong_words_are_told_in_one_line(remat: Remat, words: list[str], says: str) -> None:
    refused = remat(*words)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert says in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_help_is_short_too_and_the_version_is_said(remat: Remat) -> None:
    assert remat("-h").stdout == remat("--help").stdout
    assert remat("run", "-h").stdout == remat("run", "--help").stdout
    assert "--install-completion" in remat("-h").stdout
    assert remat("--version").stdout == f"remat {__version__}\n"


def test_a_model_goes_to_the_cuda_device_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr("torch.cuda.is_available", lambda is_there=is_there: is_there)
        assert Request().with_device().device == device
        assert Request(device="h100").with_device().device == "h100"


def test_doctor(remat: Remat) -> None:
    said = json.loads(remat("doctor", "--json").stdout)
    assert said["torch_ok"]
    assert said["ortools_ok"]
    assert said["free_bytes"] > 0
    assert isinstance(said["cuda"], list)


def test_a_search_that_is_out_of_time_asks_for_more_of_it(remat: Remat) -> None:
    words = ("--budget", "70%", "--time-limit", "0", "--solver", "cut")
    late = remat("run", remat.gpt, *words)
    assert late.exit_code == 3
    said = " ".join(late.stderr.split())
    assert "the time limit of 0 s ended the search: allow a longer one" in said
    assert "a smaller batch" not in said
