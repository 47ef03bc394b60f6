"""A warning where DDP's new buckets make sums that are not eager's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import remat
from remat.graph_capture.over_ranks.fake_group import fake_ranks
from tests.block_models import Stack, rows

WORDS = "orders its buckets anew"


@pytest.fixture(scope="module", params=["whole", "blocks"])
def planned(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    model, x = Stack(), rows()
    if request.param == "whole":
        return remat.rematerialize(model, (x,), budget="80%", solver="cut", check=False)
    return remat.rematerialize_blocks(model, "layers.*", (x,), budget="80%", check=False)


def said(module: nn.Module, n_ranks: int, **options: Any) -> list[str]:
    """What two forwards of the module in DDP warn of: a fake group cannot reduce gradients."""
    with fake_ranks(n_ranks), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = DistributedDataParallel(module, **options)
        for _ in range(2):
            wrapped(rows())
    return [str(one.message) for one in caught if WORDS in str(one.message)]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_more_than_two_ranks_are_warned_of_once_with_a_way_out(
    planned: nn.Module, options: dict[str, Any]
) -> None:
    (text,) = said(planned, 4, **options)
    assert "over 4 ranks" in text
    assert "find_unused_parameters=True" in text


def test_each_wrapper_is_warned_of(planned: nn.Module) -> None:
    assert len(said(planned, 3)) == len(said(planned, 3)) == 1


def test_first_buckets_and_two_ranks_are_silent(planned: nn.Module) -> None:
    assert said(planned, 4, find_unused_parameters=True) == []
    assert said(planned, 2) == []


def test_eager_is_silent_and_so_is_a_step_without_ddp(planned: nn.Module) -> None:
    assert said(Stack(), 4) == []
    with fake_ranks(4), warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(rows()).backward()
