"""Dropout on a CPU: eager's bits, draws and layout, for every dtype and layout of its input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import remat
from remat.graph_capture import trace
from remat.graph_capture.joint.exact_ops import DROPOUT, DROPOUT_BACKWARD, scale_of_eager
from tests.beside_eager import same_bits as same_step

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "every other": lambda x: x[:, :, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "empty": lambda x: x[:0],
    "of one element": lambda x: x[:1, :1, :1, :1],
    "one of a batch": lambda x: x[:1],
    "one of a batch, channels last": lambda x: x.contiguous(memory_format=torch.channels_last)[:1],
    "one channel": lambda x: x[:, :1],
    "one step": lambda x: x.flatten(2).transpose(1, 2)[:, -1:],
}


def laid_out(layout: str, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, 10).to(dtype)
    x[0, 0, 0, :3] = torch.tensor([torch.inf, torch.nan, -0.0])
    return LAYOUTS[layout](x)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN and the sign of zero included."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        torch.where(a.isnan(), 0, a).double().view(torch.int64),
        torch.where(b.isnan(), 0, b).double().view(torch.int64),
    )


@pytest.mark.parametrize("p", [0.1, 0.45, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_and_backward_are_eagers(layout: str, dtype: torch.dtype, p: float) -> None:
    x = laid_out(layout, dtype).detach().requires_grad_()
    torch.manual_seed(1)
    expected = functional.dropout(x, p)
    state = torch.get_rng_state()
    incoming = laid_out(layout, dtype).detach() + 1
    (expected_gradient,) = torch.autograd.grad(expected, x, incoming)
    scale = scale_of_eager(p, dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        result, mask = DROPOUT(x, p, scale)
        gradient = DROPOUT_BACKWARD(incoming, mask, scale)
    assert torch.equal(torch.get_rng_state(), state)
    assert same_bits(result, expected)
    assert result.stride() == expected.stride()
    assert same_bits(gradient, expected_gradient)
    assert mask.dtype == torch.bool
    assert mask.shape == x.shape


def test_a_gradient_of_another_layout_than_the_mask() -> None:
    x = laid_out("contiguous", torch.float32)
    _, mask = DROPOUT(x, 0.3, 1.5)
    one = torch.ones(()).expand_as(x)
    assert torch.equal(DROPOUT_BACKWARD(one, mask, 1.5), mask * 1.5)


@pytest.mark.parametrize(("p", "is_ours"), [(0.0, False), (0.3, True), (1.0, False)])
def test_all_that_draws_is_changed(p: float, *, is_ours: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(p), nn.Linear(4, 4))
    graph = trace(model, (torch.randn(2, 4),)).graph
    targets = {op.target for op in graph.ops}
    assert ({"remat.dropout.default", "remat.dropout_backward.default"} <= targets) == is_ours


class DropsAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        all_dropped, half_dropped = nn.Dropout(1.0), nn.Dropout(0.5)
        self.layers = nn.Sequential(nn.Linear(4, 4), all_dropped, nn.Linear(4, 4), half_dropped)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


def test_nothing_is_drawn_where_all_is_dropped() -> None:
    model, batch = DropsAll(), (torch.randn(2, 4),)
    module = remat.rematerialize(model, batch, budget="100%", check=False, verbose=False)
    assert same_step(model, module, batch)
