"""On a CPU float32 sums by indices come as threads do: eager does not repeat its bits either."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import RewriteError
from remat.rewriter.checking.comparison import has_nondeterministic_sums
from tests.threads import torch_threads

NODES, EDGES, WIDTH = 256, 2048, 32


class Gathering(nn.Module):
    """Messages along edges; backward of each `h[source]` adds up what nodes get of their edges."""

    def __init__(self, n_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(n_layers))

    def forward(self, h: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            message = torch.tanh(layer(torch.cat([h[source], h[target]], 1)))
            h = h + torch.zeros_like(h).index_add_(0, target, message)
        return h.square().mean()


class Putting(nn.Module):
    """Writes with `accumulate` in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, source: Tensor, target: Tensor) -> Tensor:
        message = torch.tanh(self.layer(h[source]))
        at = (target[:, None] * WIDTH + torch.arange(WIDTH)).reshape(-1)
        first = torch.zeros_like(h).put_(at, message.reshape(-1), accumulate=True)
        return first.index_put((target,), message, accumulate=True).square().mean()


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    source, target = torch.randint(NODES, (2, EDGES))
    return torch.randn(NODES, WIDTH, dtype=dtype, requires_grad=True), source, target


def planned(model: nn.Module, args: Any, budget: str = "80%", **options: Any) -> nn.Module:
    return remat.rematerialize(model, args, budget=budget, **options)


@pytest.mark.parametrize("make", [Gathering, Putting])
def test_a_plan_has_eagers_bits_where_both_sum_in_one_order(make: type[nn.Module]) -> None:
    model, args = make(), batch()
    with pytest.warns(UserWarning, match="in no fixed order, in eager too"):
        module = planned(model, args)
    assert has_nondeterministic_sums(module)
    for _ in range(5):
        found = remat.check(model, module, args, steps=1)
        assert (found.differences, found.unsteady, found.in_one_order) == ((), (), True)
    assert not torch.are_deterministic_algorithms_enabled()


def test_one_thread_and_a_setting_of_the_user_give_an_order() -> None:
    model, args = Gathering(), batch()
    module = planned(model, args, check=False)
    with torch_threads(1):
        assert not has_nondeterministic_sums(module)
    torch.use_deterministic_algorithms(True)
    try:
        assert not has_nondeterministic_sums(module)
        found = remat.check(model, planned(model, args), args, steps=1)
        assert (found.differences, found.unsteady, found.in_one_order) == ((), (), False)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_other_types_and_writes_that_do_not_add_have_an_order() -> None:
    in_doubles = planned(Gathering().double(), batch(torch.float64))
    assert not has_nondeterministic_sums(in_doubles)

    class Writing(nn.Linear):
        def forward(self, h: Tensor, source: Tensor, target: Tensor) -> Tensor:
            return h.clone().index_put((target,), torch.tanh(super().forward(h)[:1])).sum()

    assert not has_nondeterministic_sums(planned(Writing(WIDTH, WIDTH), batch(), "100%"))


def test_a_wrong_gradient_is_refused_all_the_same() -> None:
    model, args = Gathering(), batch()
    other = planned(Gathering(), args, check=False)
    with torch.no_grad():
        for own, theirs in zip(other.parameters(), model.parameters(), strict=True):
            own.copy_(theirs)
        next(other.parameters()).view(-1)[0] += 1e-6
    found = remat.check(model, other, args, steps=1)
    assert "gradient of layers.0.weight" in found.differences


def test_a_model_that_reads_a_clock_is_refused() -> None:
    class Clocked(Gathering):
        def forward(self, h: Tensor, source: Tensor, target: Tensor) -> Tensor:
            return super().forward(h, source, target) * time.perf_counter()

    with pytest.raises(RewriteError, match="eager itself gives another"):
        planned(Clocked(), batch())
    assert not torch.are_deterministic_algorithms_enabled()
