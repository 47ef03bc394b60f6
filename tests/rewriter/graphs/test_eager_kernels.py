"""Ops that torch decomposes in Python while it traces, and compiles for eager: to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from remat.graph_capture import measure_costs, trace
from remat.graph_capture.tracing.fake_tensors import kernels_of_eager
from remat.rewriter.checking.check import check
from remat.rewriter.rewriting import rewrite
from remat.solver import solve_within
from tests.rows import rows

Made = tuple[nn.Module, Tensor]


class Then(nn.Module):
    """A layer and what a function makes of its result, squared and averaged."""

    def __init__(self, layer: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).float().square().mean()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layers = kind(16, 32, 2, dropout=0.3, bidirectional=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0].square().mean()


class MixedDtypes(nn.Module):
    """A body in bfloat16 between a norm and a matrix in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(64, 64).bfloat16(), nn.LayerNorm(64)
        self.matrix = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.body(x.bfloat16()).float()) @ self.matrix).square().mean()


def resized(dims: int, mode: str, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](3, 4, 3)
        layer = Then(
            convolution, lambda y: functional.interpolate(y, scale_factor=1.7, mode=mode, **options)
        )
        return layer, torch.randn(2, 3, *[8] * dims)

    return make


def shrunk(function: Callable[[Tensor], Tensor]) -> Callable[[], Made]:
    return lambda: (Then(nn.Linear(32, 32), function), torch.randn(16, 32))


CASES: dict[str, Callable[[], Made]] = {
    "rnn, tanh": lambda: (Recurrent(nn.RNN), torch.randn(5, 4, 16)),
    "rnn, relu": lambda: (Recurrent(nn.RNN, nonlinearity="relu"), torch.randn(5, 4, 16)),
    "gru": lambda: (Recurrent(nn.GRU, batch_first=True), torch.randn(4, 5, 16)),
    "nearest 1d": resized(1, "nearest"),
    "nearest 2d": resized(2, "nearest"),
    "nearest 3d": resized(3, "nearest"),
    "nearest exact": resized(2, "nearest-exact"),
    "linear": resized(1, "linear", align_corners=True),
    "bilinear": resized(2, "bilinear", align_corners=False),
    "bilinear, antialias": resized(2, "bilinear", antialias=True),
    "bicubic": resized(2, "bicubic"),
    "trilinear": resized(3, "trilinear"),
    "softshrink": shrunk(functional.softshrink),
    "hardshrink": shrunk(functional.hardshrink),
    "multi margin": shrunk(
        lambda y: functional.multi_margin_loss(y, torch.arange(16)),
    ),
    "stft": shrunk(
        lambda y: torch.view_as_real(torch.stft(y, 8, return_complex=True, window=torch.ones(8)))
    ),
    "mixed dtypes": lambda: (MixedDtypes(), torch.randn(32, 64)),
}


SLOW = ("gru", "rnn, relu", "rnn, tanh")
NAMED = rows(CASES, lambda name: name not in SLOW)


@pytest.mark.parametrize("name", NAMED)
def test_kept_and_recomputed_both_train_as_eager_does(name: str) -> None:
    torch.manual_seed(0)
    model, x = CASES[name]()
    traced = trace(model, (x,))
    graph = measure_costs(traced)
    least = solve_within(graph, 0, "chen_greedy").least_feasible_bytes
    for solver, budget_bytes in (("store_all", 1 << 60), ("chen_greedy", least)):
        result = solve_within(graph, budget_bytes, solver)
        assert result.schedule is not None
        found = check(model, rewrite(model, result.schedule, trace=traced), (x,))
        assert found.differences == ()
        assert found.plan_peak_bytes == result.peak_bytes


def test_torchs_own_decompositions_are_put_back() -> None:
    op = torch.ops.aten.upsample_bicubic2d.vec
    before = dict(op.py_kernels)
    assert before
    with kernels_of_eager("cpu"):
        assert len(op.py_kernels) < len(before)
    assert op.py_kernels == before
    model, x = CASES["bicubic"]()
    assert any("upsample_bicubic2d" in o.target for o in trace(model, (x,)).graph.ops)
    assert op.py_kernels == before
