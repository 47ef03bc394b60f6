"""What the guards of a rewritten step cost: `python -m benchmarks.runtime` prints it with the rest.

Before each step a rewritten module compares all that its plan relies on with what it was. Those of
Python's state alone are a part of it. A step is too long, and too unsteady on a machine that others
share, to see some tens of microseconds in it. So the guards are called by themselves, in short
bursts, each beside a burst of an empty call; the quickest burst of each kind counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import remat
from examples.gpt import GPT, Sizes
from remat.rewriter.user_module.module import RematModule

DEEP = Sizes(layers=12, width=256, heads=4, seq=256, batch=8, vocab=1024, dropout=0.0)
MODULES = 1000
CALLS = 20
"""Of one burst."""


class Scaled(nn.Module):
    """A layer that reads a number and a flag of its own, as layers of adapters do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale, self.is_on = 1.0, True

    def forward(self, x: Tensor) -> Tensor:
        """The scaled layer, or nothing of it."""
        return x + self.scale * torch.tanh(self.linear(x)) if self.is_on else x


def deep_gpt(sizes: Sizes) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A GPT of these sizes and a batch of random tokens."""
    torch.manual_seed(0)
    tokens = torch.randint(sizes.vocab, (sizes.batch, sizes.seq + 1))
    return GPT(sizes), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def many_modules(modules: int, width: int = 64) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A chain of so many modules, two a layer, and its batch."""
    torch.manual_seed(0)
    layers = [Scaled(width) for _ in range(modules // 2)]
    return nn.Sequential(*layers), (torch.randn(256, width),)


def guards_row(
    name: str, model: nn.Module, args: tuple[Tensor, ...], rounds: int
) -> dict[str, Any]:
    """Microseconds of the guards before one step, and as a part of the eager step."""
    fast = remat.rematerialize(model, args, budget="100%", solver="store_all", check=False)
    assert isinstance(fast, RematModule)

    def step(module: nn.Module) -> None:
        model.zero_grad(set_to_none=True)
        module(*args).sum().backward()

    for _ in range(2):
        step(fast)
    guards, batch = type(fast)._remat_guards, (args, {}, None)
    eager_us = statistics.median(_burst_us(lambda: step(model), 1) for _ in range(5))
    all_us = least_us(lambda: guards.require(batch), rounds)
    return {
        "model": name,
        "modules": sum(1 for _ in model.modules()),
        "python_state_us": least_us(guards.python_state.first_change, rounds),
        "guards_us": all_us,
        "eager_us": eager_us,
        "share": all_us / eager_us,
    }


def least_us(call: Callable[[], Any], rounds: int) -> float:
    """Time of one call, beyond that of an empty one."""
    pairs = [(_burst_us(call, CALLS), _burst_us(_nothing, CALLS)) for _ in range(rounds)]
    # Not the least difference of a pair: an empty burst that was interrupted would make it too low.
    with_call, without = map(min, zip(*pairs, strict=True))
    return (with_call - without) / CALLS


def _burst_us(call: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - start)


def _nothing() -> None:
    """What stands beside the guards."""


def guards_rows(rounds: int, sizes: Sizes = DEEP, modules: int = MODULES) -> list[dict[str, Any]]:
    """A row for a GPT of twelve layers, and one for a thousand modules."""
    gpt, chain = deep_gpt(sizes), many_modules(modules)
    return [
        guards_row(f"GPT, {sizes.layers} layers", *gpt, rounds),
        guards_row("chain of layers", *chain, rounds),
    ]


def guards_text(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    return (
        f"guards of {row['model']}: {row['guards_us']:.0f} us a step, "
        f"{100 * row['share']:.2f} % of eager's {row['eager_us']:.0f} us; of them "
        f"{row['python_state_us']:.0f} us for Python's state ({row['modules']} modules)"
    )
