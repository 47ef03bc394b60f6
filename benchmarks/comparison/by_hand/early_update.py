"""Each parameter updated in backward, by an optimizer of its own in a hook.

As torch's tutorial writes it ("How to save memory by fusing the optimizer step into the backward
pass", https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.comparison.methods import Variant
from benchmarks.comparison.models import Trainee

RATE = 1e-4


@dataclass(frozen=True)
class Updating(Variant):
    """A variant whose step ends with updated parameters.

    Attributes
    ----------
    optimizers : that hold the state. finish : called after backward.
    """

    optimizers: tuple[Optimizer, ...] = ()
    finish: Callable[[], None] = lambda: None


def adamw(model: nn.Module) -> AdamW:
    """The optimizer of all rows."""
    return AdamW(model.parameters(), RATE)


def finished_by(optimizer: Optimizer) -> Callable[[], None]:
    """An update of what has a gradient, which then goes."""

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return finish


def after_backward(trainee: Trainee) -> Updating:
    """The unmodified step, and its update at the end."""
    optimizer = adamw(trainee.model)
    return Updating(trainee.model, optimizers=(optimizer,), finish=finished_by(optimizer))


def in_backward(trainee: Trainee) -> Updating:
    """An update for each parameter as soon as its gradient is complete."""
    optimizers = {p: AdamW([p], RATE) for p in trainee.model.parameters()}

    def update(parameter: Tensor) -> None:
        finished_by(optimizers[parameter])()

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        handles = [p.register_post_accumulate_grad_hook(update) for p in optimizers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    return Updating(trainee.model, context, tuple(optimizers.values()))
