"""The gradient of a product is eager's, to the bit and in its memory, whether a factor is zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture import measure_costs, trace
from remat.rewriter.checking.check import check
from remat.rewriter.checking.measured_step import measured_step
from remat.rewriter.rewriting import rewrite
from remat.schedules.simulate import simulate
from tests.steps import schedule_of

TARGET = "remat.gradient_of_product.default"
PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda t: t.prod(),
    "first": lambda t: t.prod(0),
    "last": lambda t: t.prod(-1),
    "kept": lambda t: t.prod(1, keepdim=True),
    "double": lambda t: t.prod(1, dtype=torch.float64),
    "all double": lambda t: t.prod(dtype=torch.float64),
    "not packed": lambda t: t.transpose(0, 2).prod(),
    "not packed, one dimension": lambda t: t.transpose(0, 2).prod(1),
    "a vector": lambda t: t[0, 0].prod() + t[0, 0].prod(0),
}


class Product(nn.Module):
    def __init__(self, how: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.how = PRODUCTS[how]
        self.weight = nn.Parameter(torch.rand(7, 9, 11, dtype=dtype) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        found = self.how(self.weight * x).sum()
        return found.real if found.is_complex() else found


def factors(zeros: int) -> Tensor:
    torch.manual_seed(0)
    x = torch.rand(7, 9, 11) + 0.6
    x.view(-1)[torch.tensor([0, 200, 500])[:zeros]] = 0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("how", PRODUCTS)
def test_bits_are_eagers(how: str, dtype: torch.dtype) -> None:
    if "double" in how and dtype.is_complex:
        pytest.skip("a complex product is not cast to a real one")
    model = Product(how, dtype)
    graph = measure_costs(trace(model, (factors(0),)))
    assert any(op.target == TARGET for op in graph.ops)
    module = rewrite(model, schedule_of(graph, "store_all"))
    for zeros in (0, 1, 3):
        assert check(model, module, (factors(zeros),), steps=1).differences == ()


@pytest.mark.parametrize("how", PRODUCTS)
def test_one_peak_holds_for_all_numbers_and_is_no_more_than_eagers(how: str) -> None:
    model = Product(how)
    graph = measure_costs(trace(model, (factors(0),)))
    schedule = schedule_of(graph, "store_all")
    predicted = simulate(graph, schedule).peak_bytes
    module = rewrite(model, schedule)
    assert predicted <= measured_step(model, model, (factors(0),)).peak_bytes
    assert check(model, module, (factors(0),), steps=1).plan_peak_bytes == predicted
    for zeros in (1, 3):  # one factor more, to begin with
        found = check(model, module, (factors(zeros),), steps=1).plan_peak_bytes
        assert found <= predicted + 16


def test_a_device_that_is_not_here_has_a_cost_for_it() -> None:
    graph = remat.capture(Product("all"), (factors(0),), device="h100")
    (op,) = (op for op in graph.ops if op.target == TARGET)
    assert op.cost_us > 0
