"""Attention whose heads context parallel ranks share.

Each rank has a part of the tokens of each sequence. Before attention ranks exchange tokens for
heads, and behind it they exchange them back (DeepSpeed Ulysses, Jacobs et al. 2023,
https://arxiv.org/abs/2309.14509). So causal attention is as much work on each rank, and a head has
the bits that it has on one rank alone. Where there are more ranks than heads of keys, each such
head goes to several ranks.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn

from remat.graph_capture.cluster.attention_mode import AttentionMode
from remat.graph_capture.cluster.chain_shape import shares_heads
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.over_ranks.dtensors import is_distributed

HEADS, TOKENS = 1, 2
"""Dimensions of a query, key or value."""
WAY_OUT = "plan with --cp 1"


def why_unshared(query: Tensor, key: Tensor, mask: Tensor | None) -> str:
    """What keeps context parallel ranks from sharing a call of attention; empty for nothing."""
    if mask is not None:
        return "has a mask, of which a rank has its own tokens alone"
    if query.dim() != key.dim() or query.dim() != 4:
        return "is of other tensors than [batch, heads, tokens, width]"
    if is_distributed(query):
        return "is of DTensors (use_local_output=True in tp_plan gives it plain ones)"
    if query.shape[TOKENS] != key.shape[TOKENS]:
        return "is over the keys of other tokens than its queries"
    return ""


def require_shared(query: Tensor, key: Tensor, mask: Tensor | None, ranks: int) -> None:
    """Raise `CaptureError` for a call of attention that so many ranks cannot share."""
    why = why_unshared(query, key, mask)
    heads = (query.shape[HEADS], key.shape[HEADS])
    if not why and not shares_heads(heads, 1, ranks):
        why = f"has {heads[0]} heads of queries and {heads[1]} of keys on each rank"
    if why:
        raise CaptureError(
            f"{ranks} context parallel ranks cannot share this attention, which {why}: {WAY_OUT}"
        )


class HeadsOverRanks(AttentionMode):
    """Torch's fused attention over all tokens, of this rank's share of the heads.

    Raises
    ------
    CaptureError : when it is called with what ranks cannot share.
    """

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.n = group, dist.get_world_size(group)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        """This rank's tokens of the attention, [batch, heads, tokens, width]."""
        require_shared(query, key, given.get("attn_mask"), self.n)
        copies = max(self.n // key.shape[HEADS], 1)
        if copies > 1:
            key, value = (t.repeat_interleave(copies, HEADS) for t in (key, value))
        query, key, value = (self._to_heads(t) for t in (query, key, value))
        found = nn.functional.scaled_dot_product_attention(query, key, value, **given)
        return self._to_tokens(found)

    def _to_heads(self, t: Tensor) -> Tensor:
        """From all heads of own tokens to all tokens of own heads."""
        batch, heads, tokens, width = t.shape
        parts = t.reshape(batch, self.n, heads // self.n, tokens, width).transpose(0, 1)
        found = self._exchanged(parts).permute(1, 2, 0, 3, 4)
        return found.reshape(batch, heads // self.n, self.n * tokens, width)

    def _to_tokens(self, t: Tensor) -> Tensor:
        """The other way round."""
        batch, heads, tokens, width = t.shape
        parts = t.reshape(batch, heads, self.n, tokens // self.n, width).permute(2, 0, 1, 3, 4)
        found = self._exchanged(parts).transpose(0, 1)
        return found.reshape(batch, self.n * heads, tokens // self.n, width)

    def _exchanged(self, t: Tensor) -> Tensor:
        """The i-th part of it goes to the i-th rank."""
        flat = t.contiguous().flatten()
        return collectives.all_to_all_single_autograd(flat, None, None, self.group).view(t.shape)
