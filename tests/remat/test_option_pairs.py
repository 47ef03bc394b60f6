"""Pairs of options that do not go together: refused at the door, and told in the docs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.graph_capture.tracing.option_pairs import PAIRS, OptionPair, as_table, not_taken_with
from tests.paths import ROOT


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def values(one: nn.Module) -> dict[str, Any]:
    """A value for each option of the table that asks for it."""
    return {
        "accumulate": True, "blocks": "*", "compile": True, "cuda_graphs": True,
        "dynamic": {"input": {0: ("rows", 2, 8)}},
        "float_inputs": ["p"], "host": "1GiB", "keep": "0", "nvme": "/tmp:1GiB",
        "outputs": (0,),
        "optimizer_in_backward": torch.optim.SGD(one.parameters(), 0.1), "recompute": "0",
        "sharding": remat.Sharding("ddp", 2), "solver": "cut", "split": "exact",
    }  # fmt: skip


OF_PLANS, OF_RANKS = "use_arena", "group"  # asked of a plan that is there, or on ranks alone
AT_THE_DOOR = [p for p in PAIRS if p.other != OF_RANKS and p.one != OF_PLANS]


@pytest.mark.parametrize("pair", AT_THE_DOOR, ids=str)
def test_both_are_refused_before_anything_runs(pair: OptionPair) -> None:
    one = model()
    given = {name: values(one)[name] for name in (pair.one, pair.other)}
    with pytest.raises(pair.error) as told:
        remat.rematerialize(one, (torch.ones(4, 4),), budget="60%", **given)
    assert str(told.value) == str(pair)
    assert all(parameter.grad is None for parameter in one.parameters())


NAMES = {name for pair in PAIRS for name in (pair.one, pair.other)}


@pytest.mark.parametrize("name", sorted(NAMES - {OF_PLANS}))
def test_each_alone_is_not_refused_by_the_table(name: str) -> None:
    from remat.step_spec import StepSpec

    one = model()
    asked = StepSpec(one, **{name: values(one)[name]}).asked if name != "group" else {"group": True}
    assert [key for key, is_asked in asked.items() if is_asked] == [name]


def test_the_docs_have_the_table() -> None:
    assert as_table() in (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")


def test_a_pair_holds_for_both_of_its_options() -> None:
    assert {"compile", "dynamic", "host"} <= not_taken_with("cuda_graphs")
    assert "cuda_graphs" in not_taken_with("compile") & not_taken_with("host")
    assert not_taken_with("accumulate") == {"use_arena"}
    assert not_taken_with("optimizer") == set()
