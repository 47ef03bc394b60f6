"""One step of a rewritten module beside one of the model: bits, random stream, bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from remat.graph_capture.devices.memory_events import measure_live


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
