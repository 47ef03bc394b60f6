"""`--sharding`: one rank is planned, nothing is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.remat.cli.conftest import Remat

QUICK = ("--time-limit", "600")


def test_run_plans_one_rank_and_measures_nothing(remat: Remat) -> None:
    how = ("--sharding", "kind=fsdp2,world=4,blocks=blocks.*")
    done = remat("run", remat.gpt, *how, "--budget", "80%", *QUICK, "--json")
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["check"] is None
    shown = remat("run", remat.gpt, *how, "--budget", "80%", *QUICK, columns=200).stdout
    assert "the time of communication is not counted" in shown


@pytest.mark.slow
def test_every_verb_that_captures_takes_it(remat: Remat, tmp_path: Path) -> None:
    ddp = ("--sharding", "kind=ddp,world=2")
    graph = str(tmp_path / "graph.json")
    captured = json.loads(
        remat("show", remat.gpt, "--as", "graph", *ddp, "-o", graph, "--json").stdout
    )
    resident = captured["resident"]
    assert resident["communication_bytes"] == resident["parameters_bytes"] > 0
    assert remat("run", remat.gpt, *ddp, "--budget", "90%", *QUICK).exit_code == 0
    assert remat("sweep", remat.gpt, *ddp, "--budgets", "90%", *QUICK).exit_code == 0
    again = remat("run", graph, *ddp)
    assert again.exit_code == 2
    assert "is captured already" in again.stderr


def test_ranks_have_to_be_named(remat: Remat) -> None:
    done = remat("run", "no/such/file.py:factory", "--sharding", "kind=ddp")
    assert done.exit_code == 2
    assert "name the number of ranks, world=2 or more: sharding ddp over 1 rank" in done.stderr


FSDP2 = "kind=fsdp2,world=4"
REFUSED = [
    ("replicas=3", "divides 4 ranks: 3 does not"),
    ("reshard_after_forward=3", "3 does not divide a shard group"),
    (
        "reshard_after_forward=maybe",
        "got `str` - at `reshard_after_forward`",
    ),
    ("param_dtype=int8", "mixed precision policies cannot cast to 'int8'"),
    ("bucket_views=yes", "leave out bucket_views, or choose ddp or zero1: sharding fsdp2"),
    ("states_over=3", "choose states_over as a multiple of 4"),
]


@pytest.mark.parametrize(("more", "text"), REFUSED)
def test_groups_that_do_not_divide_are_refused(remat: Remat, more: str, text: str) -> None:
    done = remat("run", "no/such/file.py:factory", "--sharding", f"{FSDP2},{more}")
    assert done.exit_code == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_policy_that_would_not_cast_is_refused(remat: Remat, tmp_path: Path) -> None:
    file = tmp_path / "double.py"
    file.write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4).double()\nbatch = (torch.ones(2, 4).double(),)"
    )
    mixed = ("--sharding", f"{FSDP2},param_dtype=bfloat16")
    done = remat("show", str(file), "--as", "graph", *mixed, "-o", str(tmp_path / "g.json"))
    assert done.exit_code == 2
    assert "param_dtype=bfloat16 needs parameters in float32" in done.stderr


def test_one_rank_of_a_mixed_hybrid_is_planned(remat: Remat, tmp_path: Path) -> None:
    file = tmp_path / "ranks.toml"
    file.write_text(
        'kind = "fsdp2"\nworld = 4\nblocks = "blocks.*"\nreplicas = 2\n'
        'reshard_after_forward = false\nparam_dtype = "bfloat16"\nreduce_dtype = "float32"\n'
    )
    words = ("show", remat.gpt, "--as", "graph", "-o", str(tmp_path / "graph.json"), "--json")
    found = json.loads(remat(*words, "--sharding", str(file)).stdout)
    plain = json.loads(remat(*words, "--sharding", FSDP2).stdout)
    parameters = "parameters_bytes"
    assert found["resident"][parameters] >= 1.9 * plain["resident"][parameters] > 0
