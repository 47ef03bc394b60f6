"""Optimizer steps of a rank's part of a cluster's plan, and what it holds beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remat.graph_capture.distributed.dtensors import local_part

Values = dict[str, Tensor]


def trained(
    part: Any, batches: list[Tensor], look: Callable[[Any, Tensor], None] | None = None
) -> Values:
    """Losses and gradients of an optimizer step on each batch, of this rank's own parts.

    Parameters
    ----------
    look : called once with the part and the batch, when the first step has made its gradients.
    """
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    found: Values = {}
    for step, ids in enumerate(batches):
        losses: list[Tensor] = []
        part.schedule.step(ids, target=ids, losses=losses)
        found |= {f"{step} loss {i}": loss.detach().clone() for i, loss in enumerate(losses)}
        for name, p in part.named_parameters():
            found[f"{step} {name}"] = local_part(p.grad).clone()
        if look is not None and step == 0:
            look(part, ids)
        optimizer.step()
        optimizer.zero_grad()
    return found


def alike(eager: Values, found: Values) -> bool:
    return eager.keys() == found.keys() and all(torch.equal(eager[n], found[n]) for n in eager)


def held_bytes(part: Any) -> int:
    """Of parameters, buffers and receive buffers."""
    held = {id(t): local_part(t) for m in part.modules for t in (*m.parameters(), *m.buffers())}
    stays = sum(t.numel() * t.element_size() for t in held.values())
    return stays + sum(stage.received_bytes for stage in part.schedule.stages)
