"""Tensors of a model and of a batch without storage: what is run on them takes no memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def state_on_meta(model: nn.Module, *, trains: bool = True) -> dict[int, Any]:
    """By id, each parameter and buffer without storage, as a memo of `copy.deepcopy`.

    Parameters
    ----------
    trains : whether parameters require gradients where those of `model` do; else none does.
    """
    found: dict[int, Any] = {}
    for p in model.parameters():
        found[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=trains and p.requires_grad)
    for buffer in model.buffers():
        found[id(buffer)] = buffer.to("meta")
    return found


def leaf_on_meta(leaf: Any) -> Any:
    """A tensor without storage; anything else as it is."""
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf
