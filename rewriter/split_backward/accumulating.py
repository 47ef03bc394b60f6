"""Adds gradients to ``.grad`` as eager does: by autograd's own node of each parameter.

So hooks on parameters run, a wrapper for ranks sees its gradients, sums are made in place, and the
first gradient becomes ``.grad`` itself where eager would take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def accumulate(parameters: Sequence[Tensor], gradients: list[Tensor]) -> None:
    """Add a gradient to each parameter; the list is empty afterwards."""
    with torch.enable_grad():
        root = _Given.apply(gradients, *parameters)
    torch.autograd.backward(root, root.detach())


class _Given(torch.autograd.Function):
    """Has gradients that are there already, in a list that it lets go of."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.empty(0, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        given = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *given
