"""`remat compare`: a table that fits its terminal, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.remat.cli.conftest import Remat

WORDS = ("--solver", "msps", "--solver", "full", "--time-limit", "600")


def test_a_kept_plan_is_compared_from_its_file_alone(remat: Remat, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    solved = remat("solve", remat.gpt, "--budget", "70%", "--solver", "msps", "-o", plan)
    assert solved.exit_code == 0, solved.stderr
    said = json.loads(remat("compare", plan, *WORDS, "--json").stdout)
    assert [row["solver"] for row in said["rows"]] == ["unmodified", "this plan", "msps", "full"]
    assert len(said["bounds"]) == 4
    mine = [bound["budget_bytes"] for bound in said["bounds"]].index(
        json.loads(Path(plan).read_text())["schedule"]["budget_bytes"]
    )
    cells = {row["solver"]: row["cells"][mine] for row in said["rows"]}
    assert cells["this plan"]["time_us"] == cells["msps"]["time_us"]


@pytest.mark.parametrize("columns", [60, 100])
def test_many_budgets_fit_a_narrow_terminal(remat: Remat, columns: int) -> None:
    budgets = "90%,85%,80%,75%,70%,65%,60%"
    done = remat("compare", remat.gpt, *WORDS, "--budgets", budgets, columns=columns)
    assert done.exit_code == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= columns
    assert done.stdout.count("unmodified ") == (5 if columns == 60 else 3)
    for budget in budgets.split(","):
        assert budget in done.stdout


def test_refusals_come_before_the_model_is_loaded(remat: Remat) -> None:
    for words, says in (
        (["--budgets", "8 gigs"], "unknown unit 'gigs'"),
        (["--solver", "cutt"], "unknown solver 'cutt': did you mean cut?"),
    ):
        refused = remat("compare", "no_such_file.py:factory", *words)
        assert refused.exit_code == 2
        assert says in refused.stderr
