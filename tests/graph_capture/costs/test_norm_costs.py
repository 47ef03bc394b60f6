"""Norms of 16 bits with weights of 32, as autocast has them: each op is run and measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import remat
from tests.rows import each_nth

NORMS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "layer norm": (nn.LayerNorm(8), (16, 8)),
    "group norm": (nn.GroupNorm(2, 8), (4, 8)),
    "batch norm": (nn.BatchNorm1d(8), (16, 8)),
    "batch norm without statistics": (nn.BatchNorm1d(8, track_running_stats=False), (16, 8)),
    "norm without a weight": (nn.LayerNorm(8, elementwise_affine=False), (16, 8)),
}


@pytest.mark.parametrize("name", each_nth(2, NORMS))
def test_every_op_of_a_norm_under_autocast_is_measured(
    name: str, recwarn: pytest.WarningsRecorder
) -> None:
    norm, shape = NORMS[name]
    model, x = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 8)), torch.randn(shape)
    with torch.autocast("cpu", torch.bfloat16):
        graph = remat.capture(model, (x,))
        assert not [one for one in recwarn if "made data" in str(one.message)]
        assert {op.cost_origin for op in graph.ops} <= {"measured", "unpriced"}
        fast = remat.rematerialize(model, (x,), budget="150%", solver="store_all", check=False)
        assert remat.check(model, fast, (x,), steps=1).equal
