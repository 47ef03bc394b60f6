"""`--shard` and `--world-size`: one rank is planned, nothing is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.remat.cli.conftest import Remat

QUICK = ("--time-limit", "600")


def test_run_plans_one_rank_and_measures_nothing(remat: Remat) -> None:
    how = ("--shard", "fsdp2", "--world-size", "4", "--shard-blocks", "blocks.*")
    done = remat("run", remat.gpt, *how, "--budget", "80%", *QUICK, "--json")
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["check"] is None
    shown = remat("run", remat.gpt, *how, "--budget", "80%", *QUICK, columns=200).stdout
    assert "the time of communication is not counted" in shown


@pytest.mark.slow
def test_every_verb_that_captures_takes_it(remat: Remat, tmp_path: Path) -> None:
    ddp = ("--shard", "ddp", "--world-size", "2")
    graph = str(tmp_path / "graph.json")
    captured = json.loads(remat("capture", remat.gpt, *ddp, "-o", graph, "--json").stdout)
    resident = captured["resident"]
    assert resident["communication_bytes"] == resident["parameters_bytes"] > 0
    assert remat("solve", remat.gpt, *ddp, "--budget", "90%", *QUICK).exit_code == 0
    assert remat("sweep", remat.gpt, *ddp, "--budgets", "90%", *QUICK).exit_code == 0
    again = remat("solve", graph, *ddp)
    assert again.exit_code == 2
    assert "is a step already captured: --shard goes with a model" in again.stderr


def test_ranks_have_to_be_named(remat: Remat) -> None:
    done = remat("run", "no/such/file.py:factory", "--shard", "ddp")
    assert done.exit_code == 2
    assert "sharding ddp over 1 rank: name the number of ranks" in done.stderr
