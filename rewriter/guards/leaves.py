"""The leaves of a batch, without a walk where it is made of tensors and numbers alone."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from remat.graph_capture.tracing.signature import Signature

_LEAVES = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str})
"""Types that hold no other leaves. Of other types torch's walk knows."""


class FlatBatches:
    """Batches whose arguments are leaves themselves, as most are: no lists, no dictionaries.

    Parameters
    ----------
    signature : of the batch at capture.
    """

    def __init__(self, signature: Signature) -> None:
        self._spec = signature.spec
        args, kwargs, target = signature.spec.children()
        parts = [*args.children(), *kwargs.children(), target]
        self._is_flat = all(part.is_leaf() for part in parts)
        self._args, self._names = args.num_children, list(kwargs.context or ())

    def leaves(self, batch: Any) -> tuple[list[Any], pytree.TreeSpec]:
        """The leaves of (args, kwargs, target), and how they are put together."""
        args, kwargs, target = batch
        if self._is_flat and len(args) == self._args and list(kwargs) == self._names:
            leaves = [*args, *kwargs.values(), target]
            if _LEAVES.issuperset(map(type, leaves)):
                return leaves, self._spec
        return pytree.tree_flatten(batch)

    def tree(self, leaves: list[Any]) -> Any:
        """(args, kwargs, target) of such leaves."""
        return pytree.tree_unflatten(leaves, self._spec)
