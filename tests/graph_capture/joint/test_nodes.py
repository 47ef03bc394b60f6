"""Bytes of tensors of any strides, and of values that are looked at while a trace is made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.joint.nodes import bits_of
from remat.rewriter.checking.comparison import bitwise_equal

TENSORS = {
    "plain": torch.arange(6.0).reshape(2, 3),
    "a scalar": torch.tensor(2.5),
    "one, expanded": torch.tensor(2.5).expand(1),
    "one, expanded in two": torch.tensor(2.5).expand(1, 1),
    "many, expanded": torch.tensor(2.5).expand(3),
    "one of a stride": torch.arange(9.0)[4::5],
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "none": torch.empty(0, 3),
    "bfloat16": torch.tensor([1.5], dtype=torch.bfloat16).expand(2, 1),
    "bool": torch.tensor([True, False])[1:],
    "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
    "negative": torch.tensor([1 + 2j, 3j]).conj().imag,
}


@pytest.mark.parametrize("kind", TENSORS)
def test_bits_are_those_of_a_copy(kind: str) -> None:
    tensor = TENSORS[kind]
    copied = torch.tensor(tensor.tolist(), dtype=tensor.dtype).reshape(-1)
    wanted = copied.view(torch.uint8) if copied.numel() else torch.empty(0, dtype=torch.uint8)
    assert torch.equal(bits_of(tensor), wanted)
    assert bitwise_equal(tensor, tensor.clone())


def test_a_nan_of_one_element_equals_itself() -> None:
    nan = torch.tensor(float("nan")).expand(1)
    assert bitwise_equal(nan, nan.clone())
    assert not bitwise_equal(nan, torch.zeros(1))


class Middle(nn.Module):
    """Takes the quantile of its outputs, for which torch expands a number of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.quantile(self.linear(x), 0.25)


def test_a_number_that_torch_expands_is_known() -> None:
    torch.manual_seed(0)
    model, x = Middle(), torch.randn(4, 8)
    fast = remat.rematerialize(model, (x,), budget="100%")
    assert torch.equal(fast(x), model(x))


def test_zeros_of_a_forward_mode_derivative_have_bits() -> None:
    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.jvp(self.layers, (x,), (torch.ones_like(x),))[1].sum()

    assert remat.capture(Slope(), (torch.randn(2, 4),)).ops
