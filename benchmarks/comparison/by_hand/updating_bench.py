"""A bench whose step ends with AdamW's update."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.comparison.bench import SEED, Bench
from benchmarks.comparison.by_hand.early_update import Updating, after_backward
from benchmarks.comparison.methods import Variant

STEPS = 2
"""The second reads the state that the first has left."""


class UpdatingBench(Bench):
    """As `Bench`, for variants that update; each has a state of its own for shared parameters."""

    fastest = "fastest_update_s"

    def unmodified(self) -> Updating:
        """Backward, then the update."""
        return after_backward(self.trainee)

    def step(self, variant: Variant) -> None:
        """One step with its update; gradients are gone at the end."""
        assert isinstance(variant, Updating)
        for parameter in self.parameters:
            parameter.grad = None
        with variant.context():
            with self.autocast():
                loss = variant.call(*self.trainee.args)
            loss.backward()
            variant.finish()

    def gradients(self, variant: Variant) -> list[Tensor]:
        """What two steps from a fixed random state and an empty one change of each parameter."""
        assert isinstance(variant, Updating)
        before = [parameter.detach().clone() for parameter in self.parameters]
        torch.manual_seed(SEED)
        _empty(variant.optimizers)
        for _ in range(STEPS):
            self.step(variant)
        pairs = list(zip(self.parameters, before, strict=True))
        changed = [parameter.detach() - old for parameter, old in pairs]
        with torch.no_grad():
            for parameter, old in pairs:
                parameter.copy_(old)
        return changed

    def held(self, variant: Variant) -> list[Tensor]:
        """Also the state of the variant's optimizers."""
        assert isinstance(variant, Updating)
        return [*super().held(variant), *_state_of(variant.optimizers)]


def _state_of(optimizers: tuple[Optimizer, ...]) -> list[Tensor]:
    states = (one for optimizer in optimizers for one in optimizer.state.values())
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _empty(optimizers: tuple[Optimizer, ...]) -> None:
    for value in _state_of(optimizers):
        value.zero_()
