"""Torch's fused attention in a forward without storage: what it takes, and whether it is split."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from remat.graph_capture.cluster.attention_mode import AttentionMode
from remat.graph_capture.cluster.chain_shape import ChainShape
from remat.graph_capture.cluster.heads_over_ranks import HEADS, why_unshared


class Watcher(Protocol):
    """What follows the forward.

    Attributes
    ----------
    shape : what it showed so far. inside : the block that runs, by number; None outside of blocks.
    split : tensors that are split over tensor parallel ranks, by id.
    """

    shape: ChainShape
    inside: int | None
    split: dict[int, Tensor]


class WatchedAttention(AttentionMode):
    """Counts torch's fused attention, of which meta tensors would run the open form."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        """A tensor of the result's shape."""
        shape, is_causal = self.watcher.shape, bool(given.get("is_causal"))
        if self.watcher.inside in (None, 0):
            whole = 2 * query.numel() * key.shape[-2] + 2 * query.shape[:-1].numel() * (
                key.shape[-2] * value.shape[-1]
            )
            shape.attention_flops += whole // 2 if is_causal else whole
            shape.has_fused_attention = True
            shape.unshared = shape.unshared or why_unshared(query, key, given.get("attn_mask"))
            shape.heads.add((query.shape[HEADS], key.shape[HEADS]))
        result = query.new_empty((*query.shape[:-1], value.shape[-1]))
        if id(query) in self.watcher.split:
            self.watcher.split[id(result)] = result
        return result
