"""One schedule over a symbolic trace trains at every size of its range, to eager's bits."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.graph_capture.errors import RematError, RewriteError, SignatureError
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.sizes.symbols import corner
from remat.ranks.same_order import agreed_rewrite
from remat.rewriter.plans.loading import plan_of
from remat.schedules.family import peak_over
from tests.beside_eager import most_live_bytes, same_bits
from tests.sized_models import SIZED, Sized, gpt

QUICK = "experts"
"""The model that is planned in a moment."""


def planned(
    name: str, budget: str = "60%", device: str | None = "h100"
) -> tuple[Sized, RangedGraph, Any, nn.Module]:
    torch.manual_seed(0)
    sized = SIZED[name]()
    graph = remat.capture(
        sized.model, sized.batch(**sized.sizes[1]), dynamic=sized.dynamic, device=device
    )
    result = remat.solve(graph.top, budget, time_limit_s=5)
    if result.schedule is None:
        result = remat.solve(graph.top, "min", time_limit_s=5)
    return sized, graph, result, agreed_rewrite(sized.model, result.schedule, over=graph)


@pytest.mark.parametrize(
    "name",
    [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SIZED],
)
def test_it_trains_as_eager_at_each_size_and_within_the_budget(name: str) -> None:
    sized, graph, result, module = planned(name, device=None)
    proved = peak_over(graph, result.schedule)
    assert proved.peak_bytes <= result.budget_bytes
    for sizes in [*sized.sizes, corner(graph.symbols, "high")]:
        batch = sized.batch(**sizes)
        assert same_bits(sized.model, module, batch)
        resident_bytes = graph.at(**sizes).resident.total_bytes
        assert most_live_bytes(module, batch) + resident_bytes <= result.budget_bytes


@pytest.mark.slow
def test_sizes_out_of_the_range_and_other_batches_are_refused_before_anything_runs() -> None:
    sized, _, _, module = planned("gpt", "100%")
    for sizes in ({"batch": 2, "seq": 15}, {"batch": 17, "seq": 16}, {"batch": 1, "seq": 16}):
        with pytest.raises(SignatureError, match=r"was planned for (seq|batch) from"):
            module(*sized.batch(**sizes))
    tokens, targets = sized.batch(batch=2, seq=20)
    with pytest.raises(SignatureError, match=r"args\[1\] = int64\[2, 20\]"):
        module(tokens, targets[:, :-1])
    with pytest.raises(SignatureError, match=r"args\[0\] = int64\[2, 20\]"):
        module(tokens.int(), targets)
    with pytest.raises(SignatureError, match="strides"):
        module(tokens.t().contiguous().t(), targets)


@pytest.mark.slow
def test_copies_and_pickles_run_over_the_range_too() -> None:
    sized, _, _, module = planned("experts")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        for sizes in sized.sizes[:2]:
            x = sized.batch(**sizes)
            assert torch.equal(other(*x), sized.model(*x))


@pytest.mark.slow
def test_backwards_of_two_sizes_may_be_open_at_once() -> None:
    sized, _, _, module = planned("experts")
    first, second = sized.batch(tokens=5), sized.batch(tokens=70)
    parameters = [*sized.model.parameters()]
    wanted = [torch.autograd.grad(sized.model(*x), parameters) for x in (first, second)]
    losses = [module(*first), module(*second)]
    found = [torch.autograd.grad(loss, parameters) for loss in reversed(losses)]
    for one, other in zip(wanted, reversed(found), strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.slow
def test_gradients_that_are_added_up_at_each_size() -> None:
    sized = SIZED["experts"]()
    graph = remat.capture(
        sized.model, sized.batch(tokens=9), dynamic=sized.dynamic, device="h100", accumulate=True
    )
    module = agreed_rewrite(sized.model, remat.solve(graph.top, "70%").schedule, over=graph)
    for sizes in sized.sizes:
        assert not remat.check(
            sized.model, module, sized.batch(**sizes), accumulate=True
        ).differences


def test_a_float_that_is_made_of_a_size_is_made_again() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.inner(x) * (1.0 / (3 * x.shape[0]) ** 0.5)).tanh().sum() / x.shape[0]

    model = Scaled()
    graph = remat.capture(model, (torch.randn(5, 8),), dynamic={"x": {0: ("n", 2, 40)}})
    module = agreed_rewrite(model, remat.solve(graph.top, "100%").schedule, over=graph)
    for n in (2, 3, 7, 11, 40):
        assert same_bits(model, module, (torch.randn(n, 8),))


@pytest.mark.slow
def test_a_plan_of_another_step_or_process_is_refused() -> None:
    sized, graph, result, _ = planned("experts")
    other = gpt()
    with pytest.raises(RewriteError, match="was not captured in this process for the range"):
        agreed_rewrite(other.model, result.schedule, over=graph)
    plain = remat.capture(other.model, other.batch(batch=2, seq=16), device="h100")
    with pytest.raises(RematError, match="made for other ops"):
        agreed_rewrite(sized.model, remat.solve(plain, "100%").schedule, over=graph)
    with pytest.raises(RematError, match="solve over the range, or leave out compile=True"):
        agreed_rewrite(sized.model, result.schedule, over=graph, compile=True)


@pytest.mark.slow
def test_no_plan_file_is_made_of_it() -> None:
    _, _, _, module = planned("experts")
    with pytest.raises(RematError, match="runs one schedule over a range of sizes"):
        plan_of(module)
