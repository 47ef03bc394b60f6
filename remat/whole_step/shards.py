"""Parameters and states of a step over several ranks: each rank has its shard at its home.

A shard is rows of the first dimension, as many on each rank: the last ones end with zeros. A whole
parameter has a storage of its own, which is filled while a layer runs and empty otherwise.
Collectives are a broadcast or a reduction of each rank's rows in place, which take no memory of
torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from remat.graph_capture.distributed.sharding import shard_shape
from remat.graph_capture.errors import RewriteError
from remat.whole_step.residents import Held, Residents, moments, uninterrupted


@dataclass
class ShardedResidents(Residents):
    """`wholes` : by name, the whole parameter. `is_whole` : whether the user's tensors are whole,
    as they are before the first step. `refused` : whether some rank refuses a step."""

    wholes: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    is_whole: bool = True
    refused: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int32))

    def begin(self) -> None:
        if self.is_whole:
            with uninterrupted():
                self._split()
        super().begin()
        # Guards and the step's code know the parameters whole; their storages are still empty.
        for name, whole in self.wholes.items():
            self.parameters[name][1].data = whole

    def attach(self) -> None:
        if not self.is_whole:
            super().attach()

    def rest(self) -> None:
        if self.is_whole:
            return
        with uninterrupted():
            for name in self.wholes:
                self.drop(name)
                self.held[name].attach()
        super().rest()

    def bring_back(self) -> None:
        """Bring this rank's shards into memory, and into the user's tensors."""
        if self.is_whole:
            return
        for name in self.wholes:
            self.drop(name)
        super().bring_back()

    def require_whole(self) -> None:
        if not self.is_whole:
            raise RewriteError(
                "call bring_back(whole=True) of the step on all ranks first: this rank has only "
                "shards of the parameters and of the optimizer's state"
            )

    def make_whole(self) -> None:
        """On all ranks at once: give each the whole parameters and states, until the next step."""
        self.bring_back()
        with torch.no_grad():
            for name, whole in self.wholes.items():
                parameter, shape = self.parameters[name][1], whole.shape
                for key, shard in moments(self.optimizer, parameter).items():
                    found = shard.new_empty(shape)
                    _gather(found, shard)
                    self.optimizer.state[parameter][key] = found
                self.gather(name)
                parameter.data = whole
        self._hold_whole()

    def agree(self, error: Exception | None) -> None:
        """On all ranks at once: refuse what one of them refuses."""
        # Memory that was there before: a step takes none that was not planned.
        dist.all_reduce(self.refused.fill_(error is not None), dist.ReduceOp.MAX)
        if not self.refused.item():
            return
        said: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, None if error is None else str(error))
        for rank, text in enumerate(said):
            if error is None and text is not None:
                raise RewriteError(f"{text} (on rank {rank}; the step has run on no rank)")

    def gather(self, name: str) -> None:
        self.held[name].arrive()
        whole = self.wholes[name]
        whole.untyped_storage().resize_(whole.nbytes)
        _gather(whole, self.held[name].whole[0])

    def drop(self, name: str) -> None:
        _empty(self.wholes[name])

    @contextlib.contextmanager
    def owned(self, name: str) -> Generator[None]:
        parameter = self.parameters[name][1]
        parameter.data = self.held[name].whole[0]
        try:
            yield
        finally:
            parameter.data = self.wholes[name]

    def reduced(self, gradient: Tensor) -> Tensor:
        """This rank's rows of the mean over ranks; the memory of `gradient` is free afterwards."""
        found, n = gradient.new_zeros(_shard_shape(gradient)), dist.get_world_size()
        for rank in range(n):
            rows = _rows(gradient, rank)
            if rows.numel():
                dist.reduce(rows, rank)
            if rank == dist.get_rank():
                found[: len(rows)] = rows
        _empty(gradient)
        return found.div_(n)

    def _split(self) -> None:
        for name, (path, parameter) in self.parameters.items():
            whole, state = parameter.data, self.optimizer.state.get(parameter, {})
            for key, one in moments(self.optimizer, parameter).items():
                state[key] = _own_rows(one)
            parameter.data = _own_rows(whole)
            # Others may show this memory, or it is larger than the parameter.
            self.wholes[name] = whole if whole.untyped_storage().resizable() else whole.clone()
            self.drop(name)
            self.held[name] = Held(path, [parameter], self.folders)
        self.is_whole = False

    def _hold_whole(self) -> None:
        self.wholes.clear()
        self.is_whole = True
        self.hold()


def _empty(tensor: Tensor) -> None:
    # gloo's threads hold tensors for a while, and would let go of the memory later.
    tensor.untyped_storage().resize_(0)


def _shard_shape(whole: Tensor) -> tuple[int, ...]:
    return shard_shape(whole.shape, dist.get_world_size())


def _rows(whole: Tensor, rank: int) -> Tensor:
    """A view of the rows of a rank, without the zeros that fill the last shards."""
    each, *_ = _shard_shape(whole)
    return (whole if whole.dim() else whole.view(1))[each * rank : each * (rank + 1)]


def _own_rows(whole: Tensor) -> Tensor:
    found, rows = whole.new_zeros(_shard_shape(whole)), _rows(whole, dist.get_rank())
    found[: len(rows)] = rows
    return found


def _gather(whole: Tensor, shard: Tensor) -> None:
    for rank in range(dist.get_world_size()):
        rows = _rows(whole, rank)
        if rank == dist.get_rank():
            rows.copy_(shard[: len(rows)])
        if rows.numel():
            dist.broadcast(rows, rank)
