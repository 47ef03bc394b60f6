"""Tokens of each sequence over context parallel ranks: what each has, and their attention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from remat.cluster.mesh import shares_heads
from remat.graph_capture.distributed.dtensors import is_distributed
from remat.graph_capture.distributed.ring_attention import HEADS, TOKENS, ring_attention
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.torch_private.core import CallWatcher, all_to_all_autograd, pytree

SEQUENCE = 1  # the dimension of a batch and a border that counts tokens, along which they are split
WAY_OUT = "plan with --cp 1"
_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

# Ranks are given whole sequences, and each takes its own tokens. What runs before the blocks runs
# on these alone where it treats each token by itself, as an embedding does. Where it knows
# positions it runs on all tokens, and its result is cut.


@dataclass(frozen=True)
class SequencePart:
    """The `at`-th of `count` equal parts of sequences of `seq` tokens.

    In a `ring` of groups, the i-th of n groups shares the i-th and the i-th last of 2n parts: then
    causal attention is as much work on each.
    """

    seq: int
    at: int
    count: int
    ring: int = 1

    def of(self, batch: Any) -> Any:
        """A batch whose tensors of [batch, seq, ...] are cut; all else is as it was."""
        return pytree.tree_map(
            lambda leaf: self.along(leaf, SEQUENCE) if self.counts_tokens(leaf) else leaf, batch
        )

    def along(self, tensor: Tensor, dim: int) -> Tensor:
        # In one piece, as a whole batch is: the model's code may view it.
        if self.ring == 1:
            return tensor.chunk(self.count, dim)[self.at].contiguous()
        sharing = self.count // self.ring
        group, own = divmod(self.at, sharing)
        parts = tensor.chunk(2 * self.ring, dim)
        both = parts[group], parts[-1 - group]
        return torch.cat([part.chunk(sharing, dim)[own] for part in both], dim)

    def counts_tokens(self, leaf: object) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > SEQUENCE and (
            leaf.shape[SEQUENCE] == self.seq
        )  # fmt: skip


@dataclass(frozen=True)
class OwnLoss:
    """A loss function of the user's, of a rank's own tokens."""

    part: SequencePart
    loss_fn: Callable[..., Any]

    def __call__(self, result: Any, *target: Any) -> Any:
        return self.loss_fn(result, *self.part.of(target))


def cut_dimension(whole: object, part: object, sequence: SequencePart, name: str) -> int | None:
    """The dimension of an argument that counts tokens, or None; `CaptureError` if several do."""
    if not (isinstance(whole, Tensor) and isinstance(part, Tensor)):
        return None
    pairs = zip(whole.shape, part.shape, strict=True) if whole.dim() == part.dim() else ()
    found = [dim for dim, (of_all, own) in enumerate(pairs) if of_all != own]
    if len(found) > 1 or whole.dim() != part.dim():
        raise CaptureError(
            f"give blocks one {name} for each token, or {WAY_OUT}: it is {list(whole.shape)} for "
            f"{sequence.seq} tokens and {list(part.shape)} for a context parallel rank's"
        )
    return found[0] if found else None


# Each rank has a part of the tokens of each sequence. Before attention ranks exchange tokens for
# heads, and behind it they exchange them back (DeepSpeed Ulysses, Jacobs et al. 2023,
# https://arxiv.org/abs/2309.14509). So causal attention is as much work on each rank, and a head
# has the bits that it has on one rank alone. Where there are more ranks than heads of keys, each
# such head goes to several ranks. More ranks than that form rings, round which tokens go.


class AttentionMode(CallWatcher):
    """Has `attend` in the place of torch's fused attention; all other calls are torch's."""

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self.attend(**dict(zip(_POSITIONAL, args, strict=False)), **kwargs)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        """What a call returns; `given` are its other arguments."""


def why_unshared(query: Tensor, key: Tensor, mask: Tensor | None) -> str:
    """What keeps context parallel ranks from sharing a call of attention; empty for nothing."""
    if mask is not None:
        return "has a mask, and a rank has only the mask of its own tokens"
    if query.dim() != key.dim() or query.dim() != 4:
        return "takes tensors other than [batch, heads, tokens, width]"
    if is_distributed(query):
        return "takes DTensors (use_local_output=True in tp_plan gives it plain tensors)"
    if query.shape[TOKENS] != key.shape[TOKENS]:
        return "has keys of other tokens than its queries"
    return ""


def require_shared(query: Tensor, key: Tensor, mask: Tensor | None, ranks: int) -> None:
    why = why_unshared(query, key, mask)
    heads = (query.shape[HEADS], key.shape[HEADS])
    if not why and not shares_heads(heads, 1, ranks):
        why = f"has {heads[0]} heads of queries and {heads[1]} of keys on each rank"
    if why:
        raise CaptureError(
            f"{WAY_OUT}: {ranks} context parallel ranks cannot share this attention, which {why}"
        )


class HeadsOverRanks(AttentionMode):
    """Torch's fused attention over all tokens, of this rank's share of the heads.

    `ring`: the ranks round which tokens go, or None. Each group of ranks that share heads has two
    parts of a sequence then, which stand one after the other on each rank.
    """

    def __init__(self, group: Any, ring: Any = None) -> None:
        super().__init__()
        self.group, self.n, self.ring = group, dist.get_world_size(group), ring
        self.parts = 1 if ring is None else 2

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        """This rank's tokens of the attention, [batch, heads, tokens, width]."""
        require_shared(query, key, given.get("attn_mask"), self.n)
        copies = max(self.n // key.shape[HEADS], 1)
        if copies > 1:
            key, value = (t.repeat_interleave(copies, HEADS) for t in (key, value))
        query, key, value = (self._to_heads(t) for t in (query, key, value))
        found = self._of_heads(query, key, value, given)
        parts = found.unflatten(TOKENS, (self.parts, self.n, -1)).movedim(3, 0)
        tokens_of_all = self._exchanged(parts).transpose(0, 1)
        return tokens_of_all.flatten(3, 4).flatten(1, 2)

    def _to_heads(self, t: Tensor) -> Tensor:
        """From all heads of own tokens to all tokens of own heads."""
        batch, heads, tokens, width = t.shape
        parts = t.reshape(batch, self.n, heads // self.n, tokens, width).transpose(0, 1)
        found = self._exchanged(parts).unflatten(3, (self.parts, -1)).movedim(0, 3)
        return found.reshape(batch, heads // self.n, self.n * tokens, width)

    def _of_heads(self, query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> Tensor:
        if self.ring is None:
            return nn.functional.scaled_dot_product_attention(query, key, value, **given)
        if given.get("dropout_p"):
            raise CaptureError(
                f"set dropout of attention to 0, or {WAY_OUT}: tokens go round a ring of ranks, "
                "whose draws are not those of one rank"
            )
        if query.is_cuda and query.dtype == torch.float32:
            raise CaptureError(
                f"train in bfloat16, with mp_policy=, or {WAY_OUT}: tokens go round a ring of "
                "ranks by flash attention, which CUDA lacks in float32"
            )
        causal, scale = bool(given.get("is_causal")), given.get("scale")
        ranks, name = dist.get_world_size(self.ring), self.ring.group_name
        return ring_attention(query, key, value, causal, scale, ranks, name)[0]

    def _exchanged(self, t: Tensor) -> Tensor:
        """The i-th part of it goes to the i-th rank."""
        if self.n == 1:
            return t
        return all_to_all_autograd(t.contiguous().flatten(), None, None, self.group).view(t.shape)
