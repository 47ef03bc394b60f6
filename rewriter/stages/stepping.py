"""One call that runs a step of all microbatches, with or without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from remat.rewriter.stages.model_part import TARGET, ModelPart
from remat.rewriter.stages.receive_ring import RingStage


class StepRunner(Protocol):
    """Runs forward and backward of a rank's batch."""

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None) -> None:
        """Leave the mean gradients of the batch in ``.grad``.

        Parameters
        ----------
        args : of the model, on the rank of the first stage: tensors of [batch, ...].
        target : on the rank of the last stage. losses : gets each microbatch's loss there.
        """
        ...


class PipelineStep:
    """A schedule of `torch.distributed.pipelining`, with the loss inside of the last stage.

    Attributes
    ----------
    torch_schedule : torch's own. stages : those of this rank.
    """

    def __init__(self, torch_schedule: Any, stages: Sequence[RingStage]) -> None:
        self.torch_schedule, self.stages = torch_schedule, tuple(stages)

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None) -> None:
        """As of `StepRunner`."""
        is_first = any(stage.is_first for stage in self.stages)
        given: dict[str, Any] = {}
        if any(stage.is_last for stage in self.stages):
            # Torch splits a target in any case; the loss that is computed has read its own.
            split = torch.empty(self.torch_schedule._n_microbatches) if target is None else target
            given = {"target": split, "losses": losses}
            given |= {} if target is None else {TARGET: target}
        # The schedule would keep each result of the last stage until the step ends.
        self.torch_schedule.step(*(args if is_first else ()), return_outputs=False, **given)


def loss_itself(loss: Tensor, target: Any) -> Tensor:
    """The loss of a last stage, which has computed it."""
    return loss


class PlainStep:
    """Microbatches one after another, on a rank that has the whole model.

    Parameters
    ----------
    reduce_each : whether `fully_shard` reduces gradients after each, or once after all.
    """

    def __init__(self, module: ModelPart, microbatches: int, *, reduce_each: bool) -> None:
        self.module, self.microbatches, self.reduce_each = module, microbatches, reduce_each

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None) -> None:
        """As of `StepRunner`."""
        parts = [torch.tensor_split(arg, self.microbatches) for arg in args]
        targets = [None] * self.microbatches if target is None else (
            torch.tensor_split(target, self.microbatches)
        )  # fmt: skip
        for i, one in enumerate(targets):
            if isinstance(self.module, FSDPModule):
                is_last = i == self.microbatches - 1
                self.module.set_requires_gradient_sync(self.reduce_each or is_last)
                self.module.set_is_last_backward(is_last)
            loss = self.module(*(part[i] for part in parts), **{TARGET: one})
            loss.backward()
            if losses is not None:
                losses.append(loss.detach())
        _divide_gradients(self.module, self.microbatches)


def _divide_gradients(module: nn.Module, by: int) -> None:
    """The mean over microbatches, as torch's schedules make it."""
    if by > 1:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(by)
