"""Plans for ranks that nothing wraps say so once, where there are several ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import remat
from remat.graph_capture.distributed.sharding import ShardingKind
from remat.rewriter.guards import wrapper

CALLED: dict[ShardingKind, str] = {"ddp": "DistributedDataParallel", "fsdp2": "fully_shard"}


@pytest.mark.parametrize("kind", CALLED)
def test_a_step_that_nothing_wraps_is_told(
    kind: ShardingKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapper, "_is_one_of_ranks", lambda: True)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(4, 8)
    fast = remat.rematerialize(
        model, (x,), budget="100%", sharding=remat.Sharding(kind, 2), loss_fn=torch.sum
    )
    with pytest.warns(UserWarning, match=rf"call {CALLED[kind]} on Sequential before it trains"):
        fast(x).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(x).backward()
