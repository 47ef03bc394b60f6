"""One call that runs a step of all microbatches, with or without a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from remat.cluster.model_part import TARGET, ModelPart
from remat.rewriter.split_backward.dependencies import SplitBytes
from remat.rewriter.user_module.module import RematModule

# Torch allocates one buffer each way for each microbatch of the step. A ring of as many as are used
# at once holds the same bytes for the same time.


_ReceiveInfos = Mapping[int, Sequence[Any]]


class RingStage(PipelineStage):
    """A `PipelineStage` whose microbatches share receive buffers.

    Buffers are 0 for one a microbatch. `split` : by path of each block whose gradients of weights
    are made apart, what it has live.
    """

    input_buffers: int = 0
    gradient_buffers: int = 0
    split: Mapping[str, SplitBytes] = MappingProxyType({})

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_forward_infra(*args, **kwargs)
        _share(self.args_recv_info, self.input_buffers)
        return made

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_backward_infra(*args, **kwargs)
        _share(self.grad_recv_info, self.gradient_buffers)
        return made

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        ops = super()._get_init_p2p_neighbors_ops()
        # Two stages of a V are on one rank. torch 2.11 would connect it with itself, which gloo
        # fails at; later releases ask for these messages over NCCL alone.
        return [op for op in ops if op.group_peer != self.group_rank]

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> None:
        super().perform_reduce_grad(*args, **kwargs)
        # Torch's schedules leave parameters whole in each backward and shard them only now: the
        # guards of rewritten blocks would take them for stale ones.
        for module in self.submod.modules():
            if isinstance(module, RematModule):
                module._remat_guards.unsharded_parameters.note_sharded()

    @property
    def received_bytes(self) -> int:
        infos = (self.args_recv_info, self.grad_recv_info)
        found = [_buffer(one) for of in infos for each in of.values() for one in each]
        # Microbatches share buffers: each counts once.
        buffers = {buffer.data_ptr(): buffer.nbytes for buffer in found if buffer is not None}
        return sum(buffers.values())


def _buffer(info: Any) -> Tensor | None:
    # What a batch gives has no buffer; in torch 2.11 no name for it.
    return getattr(info, "buffer", None)


def _share(infos: _ReceiveInfos, size: int) -> None:
    for microbatch in range(size, len(infos) if size else 0):
        for info, shared in zip(infos[microbatch], infos[microbatch % size], strict=True):
            if _buffer(info) is not None:
                info.buffer = shared.buffer


def ring_size(spans: Iterable[tuple[int, int]]) -> int:
    """The fewest buffers that serve microbatches in turn, by first and last step of each use."""
    used = list(spans)
    for size in range(1, len(used)):
        sharing = (used[at::size] for at in range(size))
        pairs = (pair for users in sharing for pair in combinations(users, 2))
        if all(one[1] < other[0] or other[1] < one[0] for one, other in pairs):
            return size
    return max(len(used), 1)


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
    """A schedule of torch's, with the loss inside of the last stage."""

    def __init__(self, torch_schedule: Any, stages: Sequence[RingStage]) -> None:
        self.torch_schedule, self.stages = torch_schedule, tuple(stages)

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None) -> None:
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
    # The last stage has computed it.
    return loss


class PlainStep:
    """Microbatches one after another, on a rank that has the whole model."""

    def __init__(self, module: ModelPart, microbatches: int, *, reduce_each: bool) -> None:
        self.module, self.microbatches, self.reduce_each = module, microbatches, reduce_each

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None) -> None:
        parts = [torch.tensor_split(arg, self.microbatches) for arg in args]
        targets = [None] * self.microbatches if target is None else (
            torch.tensor_split(target, self.microbatches)
        )  # fmt: skip
        for i, one in enumerate(targets):
            if isinstance(self.module, FSDPModule):
                is_last = i == self.microbatches - 1
                # Once a step, or after each microbatch, as the plan holds gradients.
                self.module.set_requires_gradient_sync(self.reduce_each or is_last)
                self.module.set_is_last_backward(is_last)
            loss = self.module(*(part[i] for part in parts), **{TARGET: one})
            loss.backward()
            if losses is not None:
                losses.append(loss.detach())
        _divide_gradients(self.module, self.microbatches)


def _divide_gradients(module: nn.Module, by: int) -> None:
    # The mean over microbatches, as torch's schedules make it.
    if by > 1:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(by)
