"""The stage of torch's, with receive buffers for the microbatches in flight alone.

Torch allocates one buffer each way for each microbatch of the step. A ring of as many as are used
at once holds the same bytes for the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from remat.rewriter.split_backward.live_bytes import SplitBytes
from remat.rewriter.user_module.module import RematModule

ReceiveInfos = Mapping[int, Sequence[Any]]


class RingStage(PipelineStage):
    """A `PipelineStage` whose microbatches share receive buffers.

    Attributes
    ----------
    input_buffers, gradient_buffers : how many; 0 for one a microbatch. split : by path of each
        block whose gradients of weights are made apart, what it has live.
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
        """Messages by which ranks connect; none to this rank itself.

        Two stages of a V are on one rank. torch 2.11 would connect it with itself, which gloo fails
        at; later releases of torch ask for these messages over NCCL alone.
        """
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reduce gradients at the end of a step, where torch's schedules shard parameters again."""
        super().perform_reduce_grad(*args, **kwargs)
        for module in self.submod.modules():
            if isinstance(module, RematModule):
                module._remat_guards.left_whole.note_sharded()

    @property
    def received_bytes(self) -> int:
        """Of all receive buffers, once a step has run."""
        infos = (self.args_recv_info, self.grad_recv_info)
        found = [_buffer(one) for of in infos for each in of.values() for one in each]
        buffers = {buffer.data_ptr(): buffer.nbytes for buffer in found if buffer is not None}
        return sum(buffers.values())


def _buffer(info: Any) -> Tensor | None:
    """Where something is received. What a batch gives has none; in torch 2.11 no name for it."""
    return getattr(info, "buffer", None)


def _share(infos: ReceiveInfos, size: int) -> None:
    for microbatch in range(size, len(infos) if size else 0):
        for info, shared in zip(infos[microbatch], infos[microbatch % size], strict=True):
            if _buffer(info) is not None:
                info.buffer = shared.buffer


def ring_size(spans: Iterable[tuple[int, int]]) -> int:
    """The fewest buffers that serve microbatches in turn.

    Parameters
    ----------
    spans : of each microbatch, in order: the first and the last step at which its buffer is used.
    """
    used = list(spans)
    for size in range(1, len(used)):
        sharing = (used[at::size] for at in range(size))
        pairs = (pair for users in sharing for pair in combinations(users, 2))
        if all(one[1] < other[0] or other[1] < one[0] for one, other in pairs):
            return size
    return max(len(used), 1)
