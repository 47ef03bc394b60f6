"""What runs a rank's step of all microbatches, with or without a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from remat.cluster.model_part import TARGET, ModelPart
from remat.cluster.pipeline_replay import StageCosts, replay_pipeline
from remat.cluster.replayed_plan import torch_order
from remat.rewriter.graphs.backward_parts import SplitBytes
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
        """Of the receive buffers, which live from the first step on; a shared one counts once."""
        each = (*self.args_recv_info.values(), *self.grad_recv_info.values())
        found = [getattr(one, "buffer", None) for infos in each for one in infos]
        return sum({b.data_ptr(): b.nbytes for b in found if b is not None}.values())


def _share(infos: _ReceiveInfos, size: int) -> None:
    for microbatch in range(size, len(infos) if size else 0):
        for info, shared in zip(infos[microbatch], infos[microbatch % size], strict=True):
            # What a batch gives has no buffer; in torch 2.11 no name for it.
            if getattr(info, "buffer", None) is not None:
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


# Which stages a rank has under a schedule of torch's, and what that does with microbatches.


_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""The first rank has the first stage and the last one, and so on inwards."""
ZERO_BUBBLE = ("InterleavedZeroBubble", *_V_SHAPED)
"""Gradients of weights are made apart from those of inputs."""
_LEAST_GRADIENTS = 2
"""Receive buffers: a gradient may still be on its way while the next one arrives."""


def stages_of_rank(name: str, rank: int, ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """In the order of the model."""
    if name in _V_SHAPED:
        return rank, 2 * ranks - 1 - rank
    return tuple(rank + virtual_stage * ranks for virtual_stage in range(virtual_stages))


def forwards_open(name: str, ranks: int, microbatches: int, virtual_stages: int) -> tuple[int, ...]:
    order = torch_order(name, ranks, microbatches, virtual_stages)
    # A rank's own order decides how many are open, so any times do.
    replay = replay_pipeline(order, [StageCosts(1.0, 1.0, 1.0)] * (ranks * virtual_stages))
    return tuple(rank.most_open for rank in replay.ranks)


def one_stage_rings(name: str, stage: int, stages: int, microbatches: int) -> tuple[int, int]:
    """Receive buffers for inputs and for gradients, of a schedule with one stage a rank."""
    # GPipe runs all forwards first; under 1F1B as many are open as stages are left to the end.
    in_flight = microbatches if name == "GPipe" else min(microbatches, stages - stage)
    return in_flight, min(microbatches, _LEAST_GRADIENTS)


def rings_of(actions: Sequence[Any], stage: int, m: int, *, keeps_inputs: bool) -> tuple[int, int]:
    """The same of a rank's actions, transfers included (torch's `pipeline_order_with_comms`)."""
    flat = [action for one in actions for action in (one.sub_actions or (one,))]
    inputs = _spans(flat, stage, m, ("RECV_F", "F"))
    gradients = _spans(flat, stage, m, ("RECV_B", "B", "I"))
    sizes = ring_size(inputs), max(ring_size(gradients), _LEAST_GRADIENTS)
    # Where torch makes a gradient of inputs apart, it adds it to what is there, so inputs stay with
    # their microbatch.
    return (m if keeps_inputs else sizes[0]), min(sizes[1], m)


def _spans(
    actions: Sequence[Any], stage: int, microbatches: int, begins: tuple[str, ...]
) -> Iterable[tuple[int, int]]:
    """From what first touches a microbatch's buffer to the last action that may read it."""
    for microbatch in range(microbatches):
        own = ((i, a) for i, a in enumerate(actions) if a.microbatch_index == microbatch)
        at = {a.computation_type.value: i for i, a in own if a.stage_index == stage}
        first = min(at[kind] for kind in begins if kind in at)
        last = max(at[kind] for kind in ("B", "I", "W", "SEND_B") if kind in at)
        yield first, last


class PipelineStep:
    """A schedule of torch's, with the loss inside of the last stage."""

    def __init__(self, torch_schedule: Any, stages: Sequence[RingStage]) -> None:
        self.torch_schedule, self.stages = torch_schedule, tuple(stages)

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None) -> None:
        """Leave the mean gradients of the batch in ``.grad``.

        Parameters
        ----------
        args : of the model, on the rank of the first stage: tensors of [batch, ...].
        target : on the rank of the last stage. losses : gets each microbatch's loss there.
        """
        is_first = any(stage.is_first for stage in self.stages)
        given: dict[str, Any] = {}
        if any(stage.is_last for stage in self.stages):
            # Torch splits a target in any case; the loss that is computed has read its own.
            split = torch.empty(self.torch_schedule._n_microbatches) if target is None else target
            given = {"target": split, "losses": losses}
            given |= {} if target is None else {TARGET: target}
        # The schedule would keep each result of the last stage until the step ends.
        self.torch_schedule.step(*(args if is_first else ()), return_outputs=False, **given)


class PlainStep:
    """Microbatches one after another, on a rank that has the whole model."""

    def __init__(self, module: ModelPart, microbatches: int, *, reduce_each: bool) -> None:
        self.module, self.microbatches, self.reduce_each = module, microbatches, reduce_each

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None) -> None:
        """As of `PipelineStep`."""
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
        # The mean over microbatches, as torch's schedules make it.
        for parameter in self.module.parameters() if self.microbatches > 1 else ():
            if parameter.grad is not None:
                parameter.grad.div_(self.microbatches)
