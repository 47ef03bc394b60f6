"""What gradients take in a step: `python -m benchmarks.running.gradients`, minutes on a CPU.

The example GPT on one text of 64 tokens, where parameters weigh more than what is kept for
backward. Measured peaks above what lives between steps, beside the predicted ones:

- accumulating: one more batch whose gradients are added to those that are there;
- with an optimizer: forward, backward and update; eager's update comes after backward, a plan's
  during it (`optimizer_in_backward`).

Each plan is for the least peak known. `--length` and `--batch` change the batch.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import remat
from examples.gpt import factory
from remat.graph_capture.devices.memory_events import measure_peak
from remat.rewriter.plans.loading import plan_of
from remat.schedules.simulate import simulate

MIB, SOLVE_S = 2**20, 10.0
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=1e-2),
    "SGD with momentum": lambda p: SGD(p, lr=1e-2, momentum=0.9),
    "AdamW": lambda p: AdamW(p, lr=1e-3),
    "AdamW, foreach": lambda p: AdamW(p, lr=1e-3, foreach=True),
    "AdamW, fused": lambda p: AdamW(p, lr=1e-3, fused=True),
}


def accumulating_row(model: nn.Module, args: tuple[Any, ...]) -> str:
    """Peaks of a backward that adds to gradients."""
    fast = remat.rematerialize(
        model, args, budget="min", accumulate=True, split="none", time_limit_s=SOLVE_S
    )

    def peak(module: nn.Module) -> int:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return measure_peak(lambda: module(*args).backward())

    found = peak(model), peak(fast)
    model.zero_grad()
    return _row("accumulating", *found, _predicted_bytes(fast))


def updating_row(name: str, model: nn.Module, args: tuple[Any, ...]) -> str:
    """Peaks of a step with its update, and whether ten steps give eager's parameters."""
    eager = copy.deepcopy(model)
    others, own = OPTIMIZERS[name](eager.parameters()), OPTIMIZERS[name](model.parameters())
    fast = remat.rematerialize(
        model, args, optimizer_in_backward=own, budget="min", time_limit_s=SOLVE_S
    )

    def step(module: nn.Module, optimizer: Optimizer) -> None:
        module(*args).backward()
        optimizer.step()
        optimizer.zero_grad()

    pairs = (eager, others), (fast, own)
    for pair in pairs:
        torch.manual_seed(0)
        for _ in range(10):
            step(*pair)
    is_equal = all(map(torch.equal, eager.parameters(), model.parameters()))
    peaks = [measure_peak(lambda pair=pair: step(*pair)) for pair in pairs]
    return _row(name, *peaks, _predicted_bytes(fast)) + f"   {'yes' if is_equal else 'NO'}"


def _predicted_bytes(module: nn.Module) -> int:
    plan = plan_of(module)
    assert plan.graph is not None
    peak_bytes = simulate(plan.graph, plan.schedule).peak_bytes
    return peak_bytes - plan.graph.resident.total_bytes


def _row(name: str, *size_bytes: int) -> str:
    return f"{name:20s}" + "".join(f"{size / MIB:10.1f}" for size in size_bytes)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    asked = parser.parse_args()
    case = factory(batch=asked.batch, sequence=asked.length)
    model, args = case["model"], case["args"]
    trained = sum(p.nbytes for p in model.parameters())
    print(f"parameters and gradients: {trained / MIB:.1f} MiB each")
    print(f"least peaks known after {SOLVE_S:.0f} s of search")
    print(f"{'peak, MiB':20s}     eager      plan predicted   equal after ten steps")
    print(accumulating_row(model, args))
    for name in OPTIMIZERS:
        print(updating_row(name, copy.deepcopy(model), args))


if __name__ == "__main__":
    main()
