"""Gradients of what is used several times are added up in the first of them, as eager does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from remat.budgets import unmodified
from remat.graph_capture import capture
from remat.graph_capture.graph import WRITES_FIRST, TrainingGraph
from remat.graph_capture.joint.in_place_writes import WRITES
from remat.rewriter.checking.check import check
from remat.rewriter.rewriting import rewrite
from remat.schedules.simulate import simulate
from tests.steps import schedule_of


class TiedHead(nn.Module):
    """A language model whose table weighs more than all that its short text needs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2048, 32)
        self.body = nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return nnf.linear(self.body(self.table(tokens)), self.table.weight).square().mean()


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.step(x).tanh()
        return x.sum()


class SharedConvolution(nn.Module):
    """The op that makes the terms makes the gradient of its input too."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.step(self.step(x).tanh()).tanh()).sum()


class ThreeProjections(nn.Module):
    """The sum is that of an activation's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(32, 32)
        self.projections = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).relu()
        q, k, v = (projection(x) for projection in self.projections)
        return (q.sigmoid() * k.tanh() * v.relu()).sum()


class Penalised(nn.Module):
    """One term is laid out like no other: the weight's own, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.step.weight
        return self.step(x).tanh().sum() + (weight @ weight.t()).tanh().sum() + weight.exp().sum()


CASES: dict[str, tuple[type[nn.Module], Tensor, int]] = {
    "tied head": (TiedHead, torch.arange(8)[None], 1),
    "unrolled": (Unrolled, torch.ones(2, 128), 6),
    "shared convolution": (SharedConvolution, torch.ones(1, 64, 2, 2), 4),
    "three projections": (ThreeProjections, torch.ones(16, 32), 2),
    "penalised": (Penalised, torch.ones(2, 48), 3),
}


def case(name: str, accumulate: bool) -> tuple[nn.Module, tuple[Tensor, ...], TrainingGraph]:
    torch.manual_seed(0)
    kind, x, _ = CASES[name]
    model = kind()
    return model, (x,), capture(model, (x,), accumulate=accumulate, split="none")


def added_in_place(graph: TrainingGraph) -> list[Any]:
    return [
        op
        for op in graph.ops
        if op.no_recompute in (WRITES, WRITES_FIRST) and op.phase == "backward"
    ]


@pytest.mark.parametrize("accumulate", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", CASES)
def test_bits_are_eagers_and_the_peak_is_no_higher(name: str, accumulate: bool) -> None:
    model, args, graph = case(name, accumulate)
    assert len(added_in_place(graph)) == CASES[name][2]
    for kind in ("store_all", "cut"):
        schedule = schedule_of(graph, kind)
        found = check(model, rewrite(model, schedule), args, accumulate=accumulate, steps=2)
        assert found.equal
        assert found.plan_peak_bytes == simulate(graph, schedule).peak_bytes
        assert found.plan_peak_bytes <= found.baseline_peak_bytes


@pytest.mark.parametrize("name", CASES)
def test_the_unmodified_step_is_predicted_with_two_terms_at_a_time(name: str) -> None:
    model, args, graph = case(name, accumulate=False)
    found = check(model, rewrite(model, schedule_of(graph, "store_all")), args, steps=1)
    assert unmodified(graph).peak_bytes == pytest.approx(found.baseline_peak_bytes, rel=0.002)


def test_sums_stay_in_the_order_of_their_terms_in_any_order_of_ops() -> None:
    """Each write reads what stands for the one before, and what releases it reads the last."""
    _, _, graph = case("unrolled", accumulate=True)
    writes = added_in_place(graph)
    value = {op.name: op.inputs[0] for op in writes}
    for name in set(value.values()):
        own = [op for op in writes if value[op.name] == name]
        for before, after in itertools.pairwise(own):
            assert before.outputs[0] in after.inputs
        last = own[-1].outputs[0]
        readers = [op for op in graph.ops if last in op.inputs]
        assert [op.target for op in readers] == ["remat.deliver"]


class Residual(nn.Module):
    """The gradient of the sum goes to both sides, and is a term of that of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.step(x)
        return (x + self.step(x).tanh()).square().sum()


def test_a_term_that_others_read_is_not_written_to() -> None:
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(4, 16)
    graph = capture(model, (x,), split="none")
    sizes = [graph.value_by_name[op.inputs[0]].size_bytes for op in added_in_place(graph)]
    assert sizes
    assert x.nbytes not in sizes
    for kind in ("store_all", "cut"):
        assert check(model, rewrite(model, schedule_of(graph, kind)), (x,), steps=2).equal


class AddsADelta(nn.Module):
    """Two parameters have one gradient, of which autograd makes a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.delta = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.weight + self.delta)).tanh().sum()


class GradientIsItsInput(nn.Module):
    """The gradient of the weight is what forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(self.weight, x)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (weight * x).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", [AddsADelta, GradientIsItsInput])
def test_a_gradient_that_others_hold_is_copied_in_the_step(
    kind: type[nn.Module], accumulate: bool
) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(64, 64)
    graph = capture(model, (x,), accumulate=accumulate)
    schedule = schedule_of(graph, "store_all")
    module = rewrite(model, schedule)
    found = check(model, module, (x,), accumulate=accumulate, steps=2)
    assert found.equal
    assert found.plan_peak_bytes == simulate(graph, schedule).peak_bytes
    assert found.plan_peak_bytes <= found.baseline_peak_bytes
    before = x.clone()
    module(x).backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert len({g.data_ptr() for g in (*gradients, x)}) == len(gradients) + 1
    assert torch.equal(x, before)
