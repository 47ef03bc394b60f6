"""What runs a rank's step of all microbatches, with or without a pipeline."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from remat.cluster.model_part import TARGET, ModelPart
from remat.cluster.pipeline_replay import StageCosts, replay_pipeline
from remat.cluster.replayed_plan import torch_order
from remat.graph_capture.errors import RematError, RewriteError, SignatureError
from remat.graph_capture.torch_private.core import pytree
from remat.rewriter.graphs.backward_parts import SplitBytes
from remat.rewriter.user_module.module import RematModule

# Torch allocates one buffer each way for each microbatch of the step. A ring of as many as are used
# at once holds the same bytes for the same time.


_ReceiveInfos = Mapping[int, Sequence[Any]]


class RingStage(PipelineStage):
    """A `PipelineStage` whose microbatches share receive buffers.

    Buffers are 0 for one a microbatch. `border` : what stages pass on, on the meta device.
    `split` : by path of each block whose gradients of weights are made apart, what it has live.
    """

    border: Tensor
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

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward_one_chunk(*args, **kwargs)
        except RuntimeError as error:
            # Torch's own error says where, and hides what to do.
            raise error.__cause__ if isinstance(error.__cause__, RematError) else error from None

    def received(self, passed: dict[int, Tensor]) -> Tensor:
        """In an evaluation: what the stage before has made, which may be on this rank."""
        if self.stage_index in passed:
            return passed.pop(self.stage_index)
        found = torch.empty_like(self.border, device=self.device)
        dist.recv(found, self._rank_of(self.stage_index - 1), self.group)
        return found

    def hand_on(self, made: Tensor, passed: dict[int, Tensor]) -> list[tuple[Any, Tensor]]:
        """In an evaluation: to the next stage; each message is to be held until it is there."""
        following = self._rank_of(self.stage_index + 1)
        if following == dist.get_rank():
            passed[self.stage_index + 1] = made
            return []
        made = made.contiguous()
        return [(dist.isend(made, following, self.group), made)]

    def _rank_of(self, stage: int) -> int:
        rank = self.stage_index_to_group_rank[stage]
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

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


def reshard(module: nn.Module) -> None:
    """Give up what `fully_shard` has gathered and no backward will."""
    for one in module.modules():
        if isinstance(one, FSDPModule):
            one.reshard()


_Losses = list[Tensor] | None


class _OfMean(torch.autograd.Function):
    """A loss whose gradients are those of its part in a mean over microbatches."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, microbatches: int) -> Tensor:
        ctx.microbatches = microbatches
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.microbatches, None


def of_mean(loss: Tensor, microbatches: int) -> Tensor:
    """A microbatch's loss to run backward of.

    What is in ``.grad`` already, of an earlier step, is not divided: torch's schedules would
    divide the sum.
    """
    return _OfMean.apply(loss, microbatches)  # pyright: ignore[reportReturnType]


class Batches:
    """Whole batches of a step, split into `count` microbatches like the planned ones."""

    def __init__(self, args: tuple[Any, ...], target: Any, count: int) -> None:
        self._planned, self.count = {"args": _shapes_of(args), "target": _shapes_of(target)}, count

    def split(self, args: tuple[Any, ...], target: Any) -> tuple[list[Any], list[Any]]:
        """Arguments and targets of each microbatch; `SignatureError` for a batch unlike these."""
        self.require(args, target)
        return _chunks(args, self.count), _chunks(target, self.count)

    def require(self, args: tuple[Any, ...], target: Any) -> None:
        """Each of the two may be left out, as ranks do that lack that end of the model."""
        for name, given in (("args", args), ("target", target)):
            planned, found = self._planned[name], _shapes_of(given)
            wanted = [(n * self.count, *rest) for n, *rest in planned]
            if found and planned and found != wanted:
                raise SignatureError(
                    "drop or pad the last batch (DataLoader(drop_last=True)), or plan again for "
                    f"other batches: a step has {self.count} microbatches, so {name} of "
                    f"{wanted}, and is given {found}"
                )


def _shapes_of(batch: Any) -> list[tuple[int, ...]]:
    leaves = pytree.tree_leaves(batch)
    return [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]


def _chunks(batch: Any, count: int) -> list[Any]:
    """As torch's schedules split it: tensors along their first dimension."""
    leaves, spec = pytree.tree_flatten(batch)
    split = [
        leaf.tensor_split(count) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * count
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([one[i] for one in split], spec) for i in range(count)]


class OfLoss:
    """Parameters of the loss, which no `fully_shard` holds: gradients are means over `groups`."""

    def __init__(self, parameters: Sequence[Tensor] = (), groups: Sequence[Any] = ()) -> None:
        self._parameters = tuple(parameters) if groups else ()
        self._groups = groups

    @contextlib.contextmanager
    def averaged(self) -> Generator[None]:
        """Of the gradients that come meanwhile; older ones are on all ranks already."""
        older = [p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None
        try:
            yield
            for p in self._parameters:
                p.grad = self._mean(torch.zeros_like(p) if p.grad is None else p.grad)
        finally:
            for p, before in zip(self._parameters, older, strict=True):
                p.grad = before if p.grad is None else p.grad if before is None else before + p.grad

    def _mean(self, own: Tensor) -> Tensor:
        for group in self._groups:
            dist.all_reduce(own, group=group)
        return own / math.prod(dist.get_world_size(group) for group in self._groups)


def _require_gradients() -> None:
    if not torch.is_grad_enabled():
        raise RewriteError(
            "call schedule.eval(x, target=y, losses=losses) for losses alone, or leave "
            "torch.no_grad() before schedule.step: a step computes gradients, which are off here"
        )


class PipelineStep:
    """A schedule of torch's, with the loss inside of the last stage."""

    def __init__(
        self, torch_schedule: Any, stages: Sequence[RingStage], batches: Batches, of_loss: OfLoss
    ) -> None:
        self.torch_schedule, self.stages = torch_schedule, tuple(stages)
        self._batches, self._of_loss = batches, of_loss

    def step(self, *args: Any, target: Any = None, losses: _Losses = None) -> None:
        """Add the mean gradients of the batch to ``.grad``.

        Parameters
        ----------
        args : of the model, on the rank of the first stage: tensors of [batch, ...].
        target : on the rank of the last stage. losses : gets each microbatch's loss there.
        """
        _require_gradients()
        self._batches.require(args, target)
        is_first = any(stage.is_first for stage in self.stages)
        given: dict[str, Any] = {}
        if any(stage.is_last for stage in self.stages):
            # Torch splits a target in any case; the loss that is computed has read its own.
            given = {"target": torch.empty(self._batches.count), "losses": losses}
            given |= {} if target is None else {TARGET: target}
        # The schedule would keep each result of the last stage until the step ends.
        with self._of_loss.averaged():
            self.torch_schedule.step(*(args if is_first else ()), return_outputs=False, **given)
        self._require_same_calls()

    def _require_same_calls(self) -> None:
        for stage in self.stages:
            assert isinstance(stage.submod, ModelPart)
            stage.submod.require_same_calls(stage.group)

    def eval(self, *args: Any, target: Any = None, losses: _Losses = None) -> None:
        """Losses of a batch as of `step`, without gradients, in the modes that modules have."""
        chunks, targets = self._batches.split(args, target)
        # Torch's own would make receive buffers anew, and fails where a rank has both ends.
        passed: dict[int, Tensor] = {}
        sent: list[Any] = []
        with torch.no_grad():
            for chunk, one in zip(chunks, targets, strict=True):
                for stage in self.stages:
                    given = chunk if stage.is_first else (stage.received(passed),)
                    found = stage.submod(*given, **({TARGET: one} if stage.is_last else {}))
                    if not stage.is_last:
                        sent += stage.hand_on(found, passed)
                    elif losses is not None:
                        losses.append(found)
        for work, _ in sent:
            work.wait()
        self._require_same_calls()


class PlainStep:
    """Microbatches one after another, on a rank that has the whole model."""

    def __init__(
        self, module: ModelPart, batches: Batches, of_loss: OfLoss, *, reduce_each: bool
    ) -> None:
        self.module, self.reduce_each = module, reduce_each
        self._batches, self._of_loss = batches, of_loss

    def step(self, *args: Any, target: Any = None, losses: _Losses = None) -> None:
        """As of `PipelineStep`."""
        _require_gradients()
        chunks, targets = self._batches.split(args, target)
        # Of a forward that no backward has followed, weights would be old ones.
        reshard(self.module)
        with self._of_loss.averaged():
            for i, (chunk, one) in enumerate(zip(chunks, targets, strict=True)):
                self._prepare(is_last=i == self._batches.count - 1)
                loss = self.module(*chunk, **{TARGET: one})
                of_mean(loss, self._batches.count).backward()
                if losses is not None:
                    losses.append(loss.detach())
        self.module.require_same_calls()

    def _prepare(self, *, is_last: bool) -> None:
        if isinstance(self.module, FSDPModule):
            # Once a step, or after each microbatch, as the plan holds gradients.
            self.module.set_requires_gradient_sync(self.reduce_each or is_last)
            self.module.set_is_last_backward(is_last)

    def eval(self, *args: Any, target: Any = None, losses: _Losses = None) -> None:
        """As of `PipelineStep`."""
        chunks, targets = self._batches.split(args, target)
        with torch.no_grad():
            for chunk, one in zip(chunks, targets, strict=True):
                loss = self.module(*chunk, **{TARGET: one})
                if losses is not None:
                    losses.append(loss)
        self.module.require_same_calls()
