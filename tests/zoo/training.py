"""Steps of training: a planned model beside an eager twin, each step with another batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from tests.zoo.case import Case, Entry

STEPS = 3
RATE = 1e-3


def differences(entry: Entry, case: Case, fast: nn.Module) -> list[str]:
    """In what a planned model and its twin differ after a step; empty if in nothing.

    Parameters
    ----------
    case : as `entry` makes it; its model is trained. fast : that model, planned.
    """
    twin = entry.make()
    twin.model.load_state_dict(case.model.state_dict())
    ways = [_Way(twin.model, twin.model, case), _Way(case.model, fast, case)]
    for i in range(STEPS):
        batch = entry.make(seed=1 + i)
        eager, ours = (way.step(batch, seed=i) for way in ways)
        if found := list(_differing(eager, ours)):
            return [f"step {i + 1}: {one}" for one in found]
    return []


class _Way:
    """A model with an optimizer of its own, and the module that runs its steps."""

    def __init__(self, model: nn.Module, module: nn.Module, case: Case) -> None:
        self.model, self.module, self.case = model, module, case
        trained = [p for p in model.parameters() if p.requires_grad]
        is_sparse = any(getattr(part, "sparse", False) for part in model.modules())
        kind = torch.optim.SGD if is_sparse else torch.optim.AdamW  # which takes no sparse gradient
        self.optimizer = kind(trained, lr=RATE)

    def step(self, batch: Case, seed: int) -> dict[str, Tensor]:
        """Train on a batch; all that the step leaves, by name."""
        torch.manual_seed(seed)
        np.random.seed(seed)
        with self.case.under_autocast():
            loss = self._loss(batch)
        loss.backward()
        gradients = {
            f"gradient of {name}": p.grad
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }
        left = {name: grad.clone() for name, grad in gradients.items()}
        self.optimizer.step()
        self.optimizer.zero_grad()
        left |= {f"parameter {name}": p.detach() for name, p in self.model.named_parameters()}
        left |= {f"buffer {name}": b for name, b in self.model.named_buffers()}
        return left | {"the loss": loss.detach(), "random numbers": torch.get_rng_state()}

    def _loss(self, batch: Case) -> Tensor:
        loss_fn = self.case.loss_fn
        if self.module is not self.model:
            given = {} if loss_fn is None or batch.target is None else {"target": batch.target}
            return self.module(*batch.args, **batch.kwargs, **given)
        output = self.model(*batch.args, **batch.kwargs)
        if loss_fn is None:
            return output
        return loss_fn(output) if batch.target is None else loss_fn(output, batch.target)


def _differing(eager: dict[str, Tensor], ours: dict[str, Tensor]) -> Iterator[str]:
    yield from sorted(eager.keys() ^ ours.keys())
    for name in eager.keys() & ours.keys():
        if not _same_bits(eager[name], ours[name]):
            yield name


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense().contiguous().reshape(-1).view(torch.uint8)
