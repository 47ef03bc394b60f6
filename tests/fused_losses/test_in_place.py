"""Tensors that forward writes to in place, where autograd records nothing, are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.budgets import unmodified
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.joint.in_place_writes import WRITES
from remat.ranks.same_order import agreed_rewrite

WIDTH = 8

Body = Callable[[Tensor], Tensor]


def read_between(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    total += x
    before = total.sin()
    total += x
    return total * before


def transposed(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    total.t().add_(x)
    total.t().mul_(x)
    return total


def part_of_a_part(x: Tensor) -> Tensor:
    total = x.new_ones(WIDTH, WIDTH)
    total[2:6][1:3] = x[:2]
    total[2:6, 1:3] += x[:4, :2]
    return total


def rows(x: Tensor) -> Tensor:
    total = torch.empty_like(x)
    for i in range(WIDTH):
        total[i] = x[i] * i
    total.diagonal().add_(1)
    return total


def to_itself(x: Tensor) -> Tensor:
    total = torch.ones_like(x)
    total.add_(total)
    total.add_(x).mul_(total)
    return total


def by_index(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    total[torch.tensor([1, 3])] = x[:2]
    total.index_add_(0, torch.tensor([1, 1]), x[:2])
    return total


def in_lower_precision(x: Tensor) -> Tensor:
    total = torch.zeros_like(x, dtype=torch.bfloat16)
    total += x
    total.addmm_(x.bfloat16(), x.bfloat16())
    return total.float()


def first_term(x: Tensor) -> Tensor:
    total = x @ x
    total += x @ x.t()
    total.sub_(x)
    return total


def two_of_one_storage(x: Tensor) -> Tensor:
    total = x.new_zeros(2, WIDTH, WIDTH)
    low, high = total.unbind()
    low += x
    high.copy_(x.tanh())
    return low + high


def read_as_a_view(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    low, high = total.split(WIDTH // 2)
    low.add_(x[: WIDTH // 2])
    high.add_(x[WIDTH // 2 :])
    return total.t()[1:].sum(0) + low.mean()


def drawn(x: Tensor) -> Tensor:
    total = torch.rand_like(x)
    total += torch.empty_like(x).uniform_(-1, 1)
    return total.mul_(torch.rand_like(x))


BODIES = (
    read_between, transposed, part_of_a_part, rows, to_itself, by_index, in_lower_precision,
    first_term, two_of_one_storage, read_as_a_view, drawn,
)  # fmt: skip


class Written(nn.Module):
    """Its forward reads what `body` has written to, and so does its backward."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            made = self.body(y)
        return self.last(torch.tanh(y) * made).square().mean()


def batch() -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))


def require_exact(graph: TrainingGraph, model: nn.Module, **how: Any) -> None:
    found = remat.solve(graph, **how)
    assert found.schedule is not None
    assert remat.check(model, agreed_rewrite(model, found.schedule), (batch(),), steps=1).equal


def all_of_them(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for body in BODIES:
        total += body(x)
    return total


def test_what_is_written_in_place_is_exact() -> None:
    model = Written(all_of_them)
    graph = remat.capture(model, (batch(),))
    for solver in ("store_all", "chen_sqrt"):
        require_exact(graph, model, budget="200%", solver=solver)


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
def test_so_it_is_in_less_memory_and_in_another_order(body: Body) -> None:
    model = Written(body)
    graph = remat.capture(model, (batch(),))
    require_exact(graph, model, budget="100%")
    require_exact(graph, model, budget="min")
    require_exact(graph, model, budget="100%", order="free")


def writes_of(body: Body) -> list[str]:
    graph = remat.capture(Written(body), (batch(),))
    return [op.target for op in graph.ops if op.no_recompute == WRITES]


def test_a_sum_is_one_value_unless_something_reads_it_before_it_is_done() -> None:
    assert writes_of(first_term) == ["aten.add.Tensor", "aten.sub.Tensor"]
    assert writes_of(read_as_a_view) == ["aten.add.Tensor", "aten.add.Tensor"]
    assert writes_of(read_between) == ["aten.add.Tensor"]
    assert writes_of(to_itself) == ["aten.add.Tensor"]


def test_what_autograd_records_may_be_computed_again() -> None:
    class Recorded(Written):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y += 1
            return self.last(torch.tanh(y)).square().mean()

    graph = remat.capture(Recorded(first_term), (batch(),))
    assert not any(op.no_recompute == WRITES for op in graph.ops)


def test_the_unmodified_peak_counts_what_a_variable_holds() -> None:
    class Holding(nn.Module):
        def __init__(self, holds: bool) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))
            self.holds = holds

        def forward(self, x: Tensor) -> Tensor:
            y = (self.weight + x).neg()
            z = y.sum(0)
            if not self.holds:
                del y
            return (z.expand(64, 64) + 1.0).mul(2.0).sum()

    peaks: list[int] = []
    for holds in (True, False):
        model, x = Holding(holds), torch.ones(64, 64)
        graph = remat.capture(model, (x,))
        found = remat.solve(graph, "100%", "store_all")
        assert found.schedule is not None
        checked = remat.check(model, agreed_rewrite(model, found.schedule), (x,), steps=1)
        assert unmodified(graph).peak_bytes == checked.baseline_peak_bytes
        peaks.append(checked.baseline_peak_bytes)
    assert peaks[0] > peaks[1]
