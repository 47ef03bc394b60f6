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


FSDP2 = ("--shard", "fsdp2", "--world-size", "4")
REFUSED = [
    (("--replicas", "3"), "3 replicas do not divide 4 ranks"),
    (
        ("--reshard-after-forward", "3"),
        "-after-forward 3 does not divide a shard group of",
    ),
    (("--reshard-after-forward", "maybe"), "maybe is neither yes, no nor a number of ranks"),
    (("--param-dtype", "int8"), "param_dtype 'int8' is none that a mixed precision policy"),
    (("--bucket-views",), "sharding fsdp2 has no bucket_views"),
    (("--states-over", "3"), "--states-over 3 ranks: choose a multiple of 4"),
]


@pytest.mark.parametrize(("words", "text"), REFUSED)
def test_groups_that_do_not_divide_are_refused(
    remat: Remat, words: tuple[str, ...], text: str
) -> None:
    done = remat("run", "no/such/file.py:factory", *FSDP2, *words)
    assert done.exit_code == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_policy_that_would_not_cast_is_refused(remat: Remat, tmp_path: Path) -> None:
    file = tmp_path / "double.py"
    file.write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4).double()\nbatch = (torch.ones(2, 4).double(),)"
    )
    done = remat(
        "capture", str(file), *FSDP2, "--param-dtype", "bfloat16", "-o", str(tmp_path / "g.json")
    )
    assert done.exit_code == 2
    assert "--param-dtype bfloat16 is for parameters held in float32" in done.stderr


def test_one_rank_of_a_mixed_hybrid_is_planned(remat: Remat, tmp_path: Path) -> None:
    how = ("--shard-blocks", "blocks.*", "--replicas", "2", "--reshard-after-forward", "no")
    graph = ("-o", str(tmp_path / "graph.json"), "--json")
    mixed = ("--param-dtype", "bfloat16", "--reduce-dtype", "float32")
    found = json.loads(remat("capture", remat.gpt, *FSDP2, *how, *mixed, *graph).stdout)
    plain = json.loads(remat("capture", remat.gpt, *FSDP2, *graph).stdout)
    parameters = "parameters_bytes"
    assert found["resident"][parameters] >= 1.9 * plain["resident"][parameters] > 0
