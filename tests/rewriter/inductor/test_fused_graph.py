"""Sums over many calls are added up as they come; other pointwise nodes stay in their readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from remat.compile.graph_context import compiled_plans
from remat.graph_capture.devices.memory_events import measure_peak
from remat.graph_capture.graph import Resident
from remat.rewriter.inductor.fused_graph import build_fused

STEPS, WIDTH = 9, 128


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def sums_in(function: Callable[[Tensor], Tensor]) -> list[int]:
    """How many values each of the stored additions reads."""
    traced = make_fx(lambda x: [function(x)], tracing_mode="fake")(torch.ones(8, 8))
    graph = build_fused(traced, 1, "sums", Resident(), "cpu").graph
    return [len(op.inputs) for op in graph.ops if op.target == "aten.add.Tensor"]


def summed(part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    parts = list[Tensor]()
    total = part(x)
    for _ in range(STEPS - 1):
        x = x @ x
        parts.append(part(x))
    for one in parts:
        total = total + one
    return total


def test_products_are_added_to_their_sum_one_after_the_other() -> None:
    assert sums_in(lambda x: summed(lambda y: y.t() @ y, x)) == [2] * (STEPS - 1)


def test_other_results_of_calls_are_added_a_few_at_a_time() -> None:
    assert sums_in(lambda x: summed(lambda y: y.sum(0), x)) == [3] * ((STEPS - 1) // 2)


def test_what_waits_for_no_later_call_stays_in_its_reader() -> None:
    def last_first(x: Tensor) -> Tensor:
        products = [x @ x for _ in range(STEPS)]
        return sum(reversed(products[:-1]), products[-1])

    assert sums_in(last_first) == [STEPS]


def test_what_others_hold_anyway_stays_in_its_reader() -> None:
    def read_twice(x: Tensor) -> Tensor:
        a, b, c = x @ x, x @ x, x @ x
        return (a + b + c) @ a @ b @ c @ (a + b + c + (x @ x))

    assert sums_in(read_twice) == [3, 4]


class Recurrent(nn.Module):
    """A cell, run again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(STEPS):
            x = self.cell(x).tanh()
        return x.square().mean()


@pytest.mark.slow
def test_gradients_of_a_shared_weight_are_not_held_until_the_last() -> None:
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(32, WIDTH)
    model(x).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    options: dict[str, Any] = {"budget": "min", "replays": 2, "solver": "cut"}
    compiled: Any = torch.compile(model, backend="remat", options=options)
    compiled(x).backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    model.zero_grad()
    plan = compiled_plans()[-1]
    measured = measure_peak(lambda: compiled(x).backward())
    assert abs(plan.held_bytes + measured - plan.peak_bytes) <= 64
    assert measured < STEPS // 2 * 4 * WIDTH**2
