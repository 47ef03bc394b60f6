"""Tensors that a collective still sends, as tensor parallel layers return: they are waited for.

Eager waits where the first op reads one. A step that is traced or compiled takes plain tensors:
torch 2.11 fails at others, and later releases wait op by op.
"""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch.autograd import Function

_SENT = "AsyncCollectiveTensor"


class _Arrived(Function):
    """The tensor that has arrived; its gradient is that of the one that was sent."""

    @staticmethod
    def forward(ctx: Any, sent: Any) -> Tensor:
        # Another object, as autograd notes its history on it.
        return sent.trigger_wait().detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def is_sent(leaf: object) -> bool:
    """Whether a collective may still write to it."""
    # Told by the name, as importing the class takes long.
    return type(leaf).__name__ == _SENT


def arrived(tree: Any) -> Any:
    """The tree with each such tensor as a plain one, once it has arrived."""
    return pytree.tree_map(lambda leaf: _Arrived.apply(leaf) if is_sent(leaf) else leaf, tree)
