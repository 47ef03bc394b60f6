"""One step of a rewritten module beside one of the model: bits, random stream, bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from remat.graph_capture.devices.memory_events import measure_live
from remat.rewriter.user_module.ranged import RangedModule
from remat.schedules.family import resized_schedule
from remat.schedules.simulate import simulate


def step_of(module: nn.Module, batch: tuple[Tensor, ...], before: list[Tensor]) -> list[Tensor]:
    """Loss, gradients, buffers and the random stream after one step from given buffers."""
    for buffer, value in zip(module.buffers(), before, strict=True):
        buffer.data.copy_(value)
    torch.manual_seed(7)
    loss = module(*batch)
    gradients = torch.autograd.grad(loss, [*module.parameters()])
    after = [buffer.clone() for buffer in module.buffers()]
    return [loss.detach(), *gradients, *after, torch.get_rng_state()]


def same_bits(model: nn.Module, module: nn.Module, batch: tuple[Tensor, ...]) -> bool:
    """Whether a step of `module` does to the last bit what one of `model` does."""
    before = [buffer.clone() for buffer in model.buffers()]
    wanted, found = step_of(model, batch, before), step_of(module, batch, before)
    return len(wanted) == len(found) and all(map(torch.equal, wanted, found))


def most_live_bytes(module: nn.Module, batch: tuple[Tensor, ...]) -> int:
    """The most bytes that a step of `module` has allocated, beyond what was there before it."""
    parameters = [*module.parameters()]

    def run() -> Any:
        return torch.autograd.grad(module(*batch), parameters)

    run()
    return max(measure_live(run)[1])


def require_as_planned(
    model: nn.Module, module: RangedModule, batch: tuple[Tensor, ...], **sizes: int
) -> None:
    """Eager's bits at these sizes, within the budget, at the peak that was predicted."""
    graph, family = module.ranged_graph, module.family
    assert graph is not None
    assert same_bits(model, module, batch), sizes
    at = graph.at(**sizes)
    predicted = simulate(at, resized_schedule(family.at(**sizes).schedule, at)).peak_bytes
    measured = most_live_bytes(module, batch) + at.resident.total_bytes
    assert measured <= family.budget_bytes, sizes
    assert abs(predicted / measured - 1) <= 0.01, sizes


def require_eagers_steps(
    eager: nn.Module, model: nn.Module, module: nn.Module,
    batch: Callable[[int, int], tuple[Tensor, ...]], lengths: tuple[int, ...],
) -> None:  # fmt: skip
    """Five steps of AdamW leave `model`, which `module` trains, with the parameters of `eager`."""
    sides = [(one, torch.optim.AdamW(one.parameters())) for one in (eager, module)]
    for number in range(5):
        for side, optimizer in sides:
            torch.manual_seed(number)
            side(*batch(lengths[number % 3], number % 3)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, eager.parameters(), model.parameters()))
