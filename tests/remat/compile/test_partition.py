"""Steps whose gradients torch's own cut gets wrong: inputs overwritten, custom ops that draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import remat
from remat.compile.graph_context import compiled_plans
from remat.ranks.same_order import agreed_rewrite
from tests.limits import AMPLE_S

OPTIONS = {"replays": 1, "solver": "cut", "time_limit_s": AMPLE_S}


class State(nn.Module):
    """Two layers, each with a function that may overwrite a buffer."""

    state: Tensor

    def __init__(self, layer: Callable[[State, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = layer
        self.weights = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(2))
        self.register_buffer("state", torch.randn(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = self.layer(self, x, weight)
        return x.square().mean()


def decayed(module: State, x: Tensor, weight: Tensor) -> Tensor:
    y = torch.sin(x * module.state.clone()) @ weight
    module.state.mul_(0.9)
    return y


def followed(module: State, x: Tensor, weight: Tensor) -> Tensor:
    scale = module.state + 1.0
    y = torch.tanh(x @ weight) * scale
    module.state.copy_(y.detach())
    return y


def shrunk(module: State, x: Tensor, weight: Tensor) -> Tensor:
    y = torch.tanh(x @ weight.clone())
    with torch.no_grad():
        weight.mul_(0.99)
    return y


class Overwriting(State):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self, x.clone(), self.weights[0])
        x[:16].add_(1.0)
        return (y * x.cos()).square().mean()


def plain(module: State, x: Tensor, weight: Tensor) -> Tensor:
    return torch.sin(x * weight.sum(0)) @ weight


def trained(model: nn.Module, step: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    """Gradients, the loss and all state of two steps, the model then as before."""
    before = {name: t.clone() for name, t in model.state_dict().items()}
    x, found = x.clone(), list[Tensor]()
    torch.manual_seed(3)
    for _ in range(2):
        model.zero_grad()
        loss = step(x)
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    found += [x, *(t.clone() for t in model.state_dict().values())]
    model.load_state_dict(before)
    return found


def require_eagers(model: nn.Module, budget: str, **options: Any) -> None:
    x = torch.randn(64, 32)
    right = trained(model, model, x)
    asked = {**OPTIONS, "budget": budget, **options}
    found = trained(model, torch.compile(model, backend="remat", options=asked), x)
    for ours, eagers in zip(found, right, strict=True):
        torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "budget"),
    [
        (decayed, "1GiB"),
        pytest.param(decayed, "min", marks=pytest.mark.slow),
        pytest.param(followed, "100%", marks=pytest.mark.slow),
        pytest.param(shrunk, "1GiB", marks=pytest.mark.slow),
        pytest.param(shrunk, "min", marks=pytest.mark.slow),
    ],
)
def test_backward_reads_what_a_buffer_held(layer: Any, budget: str) -> None:
    require_eagers(State(layer), budget)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["100%", "min"])
def test_backward_reads_what_an_input_held(budget: str) -> None:
    require_eagers(Overwriting(plain), budget)


@pytest.mark.slow
def test_an_input_with_a_gradient_of_its_own_may_be_overwritten() -> None:
    """Torch itself refuses it when it runs backward."""
    model, options = Overwriting(plain), {**OPTIONS, "budget": "100%"}
    found: list[list[Tensor]] = []
    for step in (model, torch.compile(model, backend="remat", options=options)):
        model.zero_grad()
        scale = torch.full((32,), 0.5, requires_grad=True)
        x = torch.linspace(-1, 1, 64 * 32).view(64, 32) * scale
        (step(x) + x.sum()).backward()
        gradients = [p.grad for p in (scale, *model.parameters()) if p.grad is not None]
        found.append([*gradients, x.detach()])
    for ours, eagers in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-6)


@torch.library.custom_op("remat_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draws, and has no tag that says so."""
    return x * (torch.rand_like(x) + 0.5)


@torch.library.custom_op("remat_tests::noisy_backward", mutates_args=())
def noisy_backward(gradient: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return gradient * (y / x)


for op in (noisy, noisy_backward):
    op.register_fake(lambda x, *_: torch.empty_like(x))
noisy.register_autograd(
    lambda ctx, gradient: noisy_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.op = Drawing()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(self.op(torch.tanh(layer(x)) + 2.0))
        return x.square().mean()


class Drawing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return noisy(x)


def again(schedule: Any) -> set[str]:
    """The custom ops that a schedule computes more than once."""
    return {name for name, n in schedule.computations().items() if n > 1 and "noisy" in name}


@pytest.mark.slow
def test_compiled_code_runs_a_custom_op_once() -> None:
    require_eagers(Noisy(), "min")
    assert again(compiled_plans()[-1].schedule) == set()


@pytest.mark.slow
def test_a_plan_runs_a_custom_op_once_unless_it_is_asked_for() -> None:
    model, x = Noisy(), torch.randn(64, 32)
    graph = remat.capture(model, (x,))
    result = remat.solve(graph, "min", "cut", AMPLE_S)
    assert again(result.schedule) == set()
    asked = remat.solve(graph, "min", "cut", AMPLE_S, recompute="op")
    assert again(asked.schedule)
    for found, is_equal in ((result, True), (asked, False)):
        assert found.schedule is not None
        fast = agreed_rewrite(model, found.schedule, (x,))
        assert remat.check(model, fast, (x,), steps=1).equal == is_equal


class Checkpointed(nn.Module):
    """Attention within the user's checkpoint: torch's cut saves a state of the random stream."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(32, 96)

    def attended(self, x: Tensor) -> Tensor:
        parts = [part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.project(x).chunk(3, 2)]
        return x + scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        result: Any = checkpoint(self.attended, x, use_reentrant=False)
        return result


def test_a_state_that_torchs_cut_saves_has_a_size() -> None:
    model, x = Checkpointed(), torch.randn(4, 16, 32)
    model(x).square().mean().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    compiled: Any = torch.compile(model, backend="remat", options={**OPTIONS, "budget": "100%"})
    compiled(x).square().mean().backward()
    found = [p.grad for p in model.parameters()]
    torch.testing.assert_close(found, expected)
    plan = compiled_plans()[-1]
    assert plan.peak_bytes <= plan.budget_bytes
