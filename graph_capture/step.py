"""The module that is traced: the user's model, followed by the loss if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

LossFunction = Callable[..., Any]


class Step(nn.Module):
    """``loss_fn(model(*args, **kwargs), target)``, or the model alone.

    The calling convention is that of `torch.distributed.pipelining`: `loss_fn` takes the
    model's output, and the target where one is given.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Any:
        """Run the model, then the loss."""
        return apply_loss(self.loss_fn, self.model(*args, **kwargs), target)


def apply_loss(loss_fn: LossFunction | None, output: Any, target: Any) -> Any:
    """The loss of `output`; `output` itself where there is no loss function."""
    if loss_fn is None:
        return output
    return loss_fn(output) if target is None else loss_fn(output, target)
