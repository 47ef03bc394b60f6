"""Attention whose keys serve several queries, under autocast and without it: eager's bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from tests.limits import AMPLE_S
from tests.rows import rows

HEADS, GROUPS, WIDTH = 8, 2, 64


class Attention(nn.Module):
    """Grouped-query attention as models write it."""

    def __init__(self, how: str, p: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.p, self.norm = how, p, nn.LayerNorm(WIDTH)
        widths = (WIDTH, WIDTH * GROUPS // HEADS, WIDTH * GROUPS // HEADS, WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, w, bias=False) for w in widths)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm(x)
        split = (f(y).view(batch, length, -1, WIDTH // HEADS) for f in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in split)
        if self.how != "enable_gqa":
            k, v = (self.repeated(t) for t in (k, v))
        found = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.p, enable_gqa=self.how == "enable_gqa"
        )
        merged = found.transpose(1, 2).reshape(batch, length, WIDTH)
        return (x + self.out(merged)).square().mean()

    def repeated(self, t: Tensor) -> Tensor:
        if self.how == "repeat_interleave":
            return t.repeat_interleave(HEADS // GROUPS, 1)
        batch, _, length, width = t.shape
        wide = t[:, :, None].expand(batch, GROUPS, HEADS // GROUPS, length, width)
        return wide.reshape(batch, HEADS, length, width)


DTYPES = [None, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("how", ["enable_gqa", "repeat_interleave", "expand"])
@pytest.mark.parametrize(
    ("p", "dtype"),
    rows(
        itertools.product([0.0, 0.1], DTYPES),
        lambda row: row in [(0.0, None), (0.1, torch.bfloat16)],
    ),
)
@pytest.mark.filterwarnings("ignore:aten.*:UserWarning")
def test_grouped_queries_have_eagers_bits(how: str, dtype: torch.dtype | None, p: float) -> None:
    model, x = Attention(how, p), torch.randn(4, 32, WIDTH)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        module = remat.rematerialize(
            model, (x,), budget="min", check=False, solver="cut", time_limit_s=AMPLE_S
        )
        found = remat.check(model, module, (x,), steps=1)
    assert found.differences == ()
