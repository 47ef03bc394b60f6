"""Checkpoints that are written by hand: functions whose backward runs forward once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import remat
from remat.budgets import unmodified_step
from tests.rewriter.other_peoples_code.small_models import WIDTH


class ByGrad(Function):
    """With inputs and parameters given, as in guided-diffusion; draws again in backward."""

    @staticmethod
    def forward(ctx: Any, run: Any, n_inputs: int, *args: Tensor) -> Tensor:
        ctx.run, ctx.inputs, ctx.parameters = run, list(args[:n_inputs]), list(args[n_inputs:])
        with torch.no_grad():
            return run(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            output = ctx.run(*[x.view_as(x) for x in inputs])
        wanted = inputs + ctx.parameters
        return (None, None, *torch.autograd.grad(output, wanted, gradients, allow_unused=True))


class ByBackward(Function):
    """As in Megatron and DeepSpeed: parameters in a closure, and the random state put back."""

    @staticmethod
    def forward(ctx: Any, run: Any, *args: Tensor) -> Tensor:
        ctx.run, ctx.state = run, torch.get_rng_state()
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return run(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        state = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.run(*inputs)
        torch.set_rng_state(state)
        torch.autograd.backward(output, gradients)
        return (None, *(x.grad for x in inputs))


class Offloaded(Function):
    """As in Unsloth, whose input waits on the host."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x.to("cpu", non_blocking=True))
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        x = x.to(gradient.device).detach().requires_grad_(True)
        with torch.enable_grad():
            output = ctx.run(x)
        output.backward(gradient)
        return None, x.grad


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any, *parameters: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            of_x, *rest = torch.autograd.grad(ctx.run(x), (x, *parameters), gradient)
        return of_x, None, *rest


class Surrogate(Function):
    """No checkpoint: the gradient is that of another function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(torch.sigmoid(4 * x), x, gradient)[0]


CHECKPOINTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "by grad": lambda block, x: ByGrad.apply(block, 1, x, *block.parameters()),
    "by backward": lambda block, x: ByBackward.apply(block, x),
    "offloaded": lambda block, x: Offloaded.apply(block, x),
    "once": lambda block, x: Once.apply(x, block, *block.parameters()),
    "of torch": lambda block, x: checkpoint(block, x, use_reentrant=True),
}


class Blocks(nn.Module):
    def __init__(self, checkpoint: Callable[[nn.Module, Tensor], Tensor], *more: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpoint, wide = checkpoint, 4 * WIDTH
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), *more, nn.Linear(wide, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + self.checkpoint(block, x)
        return x.square().mean()


def gradients(model: nn.Module, step: Callable[[], Tensor]) -> list[Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    step().backward()
    return [*(p.grad for p in model.parameters() if p.grad is not None), torch.get_rng_state()]


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("dropout", [False, True])
def test_a_checkpoint_by_hand_is_planned_to_eagers_bits(kind: str, dropout: bool) -> None:
    model = Blocks(CHECKPOINTS[kind], *[nn.Dropout(0.1)] * dropout)
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))
    wanted = gradients(model, lambda: model(x))
    fast: Any = remat.rematerialize(model, (x,), budget="100%", time_limit_s=2)
    found = gradients(model, lambda: fast(x))
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_it_trains_behind_a_frozen_layer_whose_result_is_made_to_require_grad(kind: str) -> None:
    model = Blocks(CHECKPOINTS[kind])
    model.first.requires_grad_(False)
    model.first.register_forward_hook(lambda module, args, out: out.requires_grad_(True))
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))
    wanted = gradients(model, lambda: model(x))
    fast: Any = remat.rematerialize(model, (x,), budget="100%", time_limit_s=2)
    assert all(map(torch.equal, gradients(model, lambda: fast(x)), wanted))
    assert len(wanted) == 1 + len([*model.blocks.parameters()])


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_its_ops_are_planned_as_any_others_and_eager_is_as_it_is_written(kind: str) -> None:
    model, x = Blocks(CHECKPOINTS[kind]), torch.randn(1024, WIDTH)
    step = remat.capture(model, (x,))
    assert not [op for op in step.ops if op.phase == "backward" and "gelu.default" in op.target]
    plan = remat.solve(step, "400%", solver="store_all")
    assert max(plan.schedule.computations().values()) == 1  # nothing has to run twice
    fast = remat.rematerialize(model, (x,), budget="100%", time_limit_s=2)
    found = remat.check(model, fast, (x,), steps=1)
    (own,) = remat.plans(fast)
    assert found.equal
    assert found.plan_peak_bytes == own.peak_bytes
    predicted = unmodified_step(step).result.peak_bytes
    # Its backward may hold its inputs and their gradients a little longer.
    assert found.baseline_peak_bytes == pytest.approx(predicted, rel=0.1)


def test_a_gradient_of_another_function_stays_what_it_is() -> None:
    model, x = Blocks(lambda block, x: Surrogate.apply(block(x))), torch.randn(64, WIDTH)
    wanted = gradients(model, lambda: model(x))
    fast: Any = remat.rematerialize(model, (x,), budget="100%", time_limit_s=2)
    assert all(map(torch.equal, gradients(model, lambda: fast(x)), wanted))
