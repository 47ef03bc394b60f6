"""Tensors of a batch that are one tensor, or that share memory with what a step writes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from remat.graph_capture.tracing.signature import first_places


def first_other_identity(
    leaves: Sequence[Any], as_captured: Sequence[int], counts: Callable[[int], bool]
) -> tuple[int, int] | None:
    """The first leaf that is another one's tensor and was not, or the reverse; and that other one.

    Parameters
    ----------
    as_captured : for each leaf, the number of the first one that was the same tensor.
    counts : whether it counts if a leaf is another one's tensor and was not.
    """
    for i, (was, now) in enumerate(zip(as_captured, first_places(leaves), strict=True)):
        if was == now:
            continue
        if was != i:
            return i, was
        if leaves[i].requires_grad or counts(i) or counts(now):
            return i, now
    return None


def first_shared(
    inputs: Sequence[Any], written: Sequence[int], n_state: int
) -> tuple[int, int] | None:
    """The places of an input that is written to, and of another one of the same memory.

    Parameters
    ----------
    n_state : how many of the inputs, the first ones, are the module's own.
    """
    of_written = {_memory(inputs[i]): i for i in written}
    # What the module holds itself is as it was captured: only the batch is another one.
    is_batch_written = any(i >= n_state for i in written)
    for i in range(0 if is_batch_written else n_state, len(inputs)):
        one, other = inputs[i], of_written.get(_memory(inputs[i]), i)
        if other != i and one is not inputs[other] and n_state <= max(i, other):
            return other, i
    return None


def _memory(value: Any) -> int:
    """Where a tensor's storage begins; a number of its own for what has none."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return -id(value)
    return value.untyped_storage().data_ptr() or -id(value)
