"""`remat explain`: its screen, its JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from remat.schedules.plan import Plan
from remat.schedules.simulate import simulate
from tests.remat.cli.conftest import Remat, written
from tests.rows import each_nth

PLANNED = ("--budget", "70%", "--solver", "cut", "--time-limit", "600")
QUICK = ("--each-limit", "3")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("explain") / "plan.json"
    written(path, "solve", *PLANNED)
    return str(path)


@pytest.fixture(scope="module")
def said(plan: str) -> dict[str, Any]:
    done = Remat()("explain", plan, *QUICK, "--why", "blocks.0.mlp.1", "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_its_figures_are_the_simulators(plan: str, said: dict[str, Any]) -> None:
    kept = Plan.from_json(Path(plan).read_bytes())
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
    done = remat("explain", plan, *QUICK, columns=columns)
    assert done.exit_code == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= columns
    shown = " ".join(done.stdout.split())
    for words in (
        "The peak is reached in", "is the least peak that cut knows",
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
def test_bad_input_is_refused(remat: Remat, plan: str, words: list[str], says: str) -> None:
    refused = remat("explain", plan, *words)
    assert refused.exit_code == 2
    assert says in refused.stderr


def test_there_must_be_a_plan_and_it_must_fit(remat: Remat) -> None:
    refused = remat("explain", remat.gpt)
    assert refused.exit_code == 2
    assert "this needs a plan: name one (MODEL --plan plan.json" in refused.stderr
    lost = remat("explain", remat.gpt, "--budget", "0.1MiB", "--solver", "cut")
    assert lost.exit_code == 3
    assert "Try --budget" in lost.stderr
