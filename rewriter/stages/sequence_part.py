"""A context parallel rank's part of each sequence, and what of a model's call is cut to it.

Ranks are given whole sequences, and each takes its own tokens. What runs before the blocks runs on
these alone where it treats each token by itself, as an embedding does. Where it knows positions it
runs on all tokens, and its result is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from remat.graph_capture.cluster.heads_over_ranks import WAY_OUT
from remat.graph_capture.cluster.on_rank import SEQUENCE
from remat.graph_capture.errors import CaptureError
from remat.rewriter.stages.border import Arrival, Before


@dataclass(frozen=True)
class SequencePart:
    """The `at`-th of `count` equal parts of sequences of `seq` tokens."""

    seq: int
    at: int
    count: int

    def of(self, batch: Any) -> Any:
        """A batch whose tensors of [batch, seq, ...] are cut; all else is as it was."""
        return pytree.tree_map(
            lambda leaf: self.along(leaf, SEQUENCE) if self.counts_tokens(leaf) else leaf, batch
        )

    def along(self, tensor: Tensor, dim: int) -> Tensor:
        """The part of a tensor. It lies in one piece, as a whole batch does: code may view it."""
        return tensor.chunk(self.count, dim)[self.at].contiguous()

    def counts_tokens(self, leaf: object) -> bool:
        """Whether it is a tensor of [batch, seq, ...]."""
        return isinstance(leaf, Tensor) and leaf.dim() > SEQUENCE and (
            leaf.shape[SEQUENCE] == self.seq
        )  # fmt: skip

    def loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """`loss_fn` of the rank's own tokens, given the target of all."""
        return lambda result, *target: loss_fn(result, *self.of(target))


@dataclass(frozen=True)
class PartOfBefore:
    """What a model runs before its first block, for one rank's tokens.

    Attributes
    ----------
    reads_all : whether it runs on all tokens, and its result is cut.
    """

    before: Before
    part: SequencePart
    reads_all: bool

    def __call__(self, *args: Any) -> Arrival:
        """The call of the first block; its other arguments are not cut."""
        if not self.reads_all:
            return self.before(*self.part.of(args))
        found = self.before(*args)
        border = self.part.along(found.border, SEQUENCE)
        return Arrival(border, found.args_, found.kwargs)


def cut_dimension(whole: object, part: object, sequence: SequencePart, name: str) -> int | None:
    """The dimension of an argument that counts tokens; None where no dimension does.

    Parameters
    ----------
    whole, part : it, where the model is given all tokens, and where it is given a rank's.

    Raises
    ------
    CaptureError : several do, as those of a mask of pairs.
    """
    if not (isinstance(whole, Tensor) and isinstance(part, Tensor)):
        return None
    pairs = zip(whole.shape, part.shape, strict=True) if whole.dim() == part.dim() else ()
    found = [dim for dim, (of_all, own) in enumerate(pairs) if of_all != own]
    if len(found) > 1 or whole.dim() != part.dim():
        raise CaptureError(
            f"blocks are given {name}, which is {list(whole.shape)} for {sequence.seq} tokens and "
            f"{list(part.shape)} for a context parallel rank's: give them one for each token, or "
            f"{WAY_OUT}"
        )
    return found[0] if found else None
