"""Batch norm in training: whose kernels it runs, and how it runs again.

A trace has `aten.native_batch_norm` whatever eager runs. On a CUDA device eager takes cuDNN's
kernels where torch's own choice falls on them, and their last bits differ. Such nodes are changed
here, with their backward, to the op that makes that choice when it runs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten

_library = torch.library.Library("remat", "FRAGMENT")
_library.define(
    "batch_norm(Tensor x, Tensor weight, Tensor bias, float momentum, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(_library, "batch_norm", "CompositeExplicitAutograd")
def batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    """``(result, mean, inverse deviation, reserve)`` by the kernels of `CHOSEN`."""
    mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    return aten._batch_norm_with_update(x, weight, bias, mean, variance, momentum, eps)


WITHOUT_STATISTICS = torch.ops.remat.batch_norm.default
TRACED = aten._native_batch_norm_legit_functional.default
TRACED_WITHOUT_STATISTICS = aten._native_batch_norm_legit.no_stats
TRACED_BACKWARD = aten.native_batch_norm_backward.default
CHOSEN = aten._batch_norm_with_update_functional.default
CHOSEN_BACKWARD = aten.batch_norm_backward.default
MEAN, RESERVE = 1, 3
"""Places among the results."""

AGAIN: dict[Any, tuple[Any, int]] = {
    TRACED: (TRACED_WITHOUT_STATISTICS, 3),
    CHOSEN: (WITHOUT_STATISTICS, 4),
}
"""For an op that also returns new running statistics: the op that computes the rest of it, and how
many results both have before the statistics."""


def makes_statistics(node: fx.Node) -> bool:
    """Whether the node also returns new running statistics, which may be made only once."""
    return node.target is CHOSEN or (node.target is TRACED and bool(node.args[5]))


def run_by_kernels_of_eager(gm: fx.GraphModule) -> None:
    """Change the batch norms of a joint graph that eager runs by cuDNN, and their backward."""
    for node in gm.graph.find_nodes(op="call_function", target=TRACED):
        x, weight, bias, mean, variance, training, momentum, eps = node.args
        if training and is_by_cudnn(node, (x, weight, bias, mean, variance), eps):
            _change(node, CHOSEN, (x, weight, bias, mean, variance, momentum, eps))
    for node in gm.graph.find_nodes(op="call_function", target=TRACED_WITHOUT_STATISTICS):
        x, weight, bias, training, momentum, eps = node.args
        if training and is_by_cudnn(node, (x, weight, bias, None, None), eps):
            _change(node, WITHOUT_STATISTICS, (x, weight, bias, momentum, eps))


def is_by_cudnn(node: fx.Node, read: tuple[Any, ...], eps: Any) -> bool:
    """Whether eager runs the node by cuDNN.

    Parameters
    ----------
    read : nodes of the input, weight, bias, running mean and running variance, or None.
    """
    x, weight, bias, mean, variance = (
        arg.meta["val"] if isinstance(arg, fx.Node) else None for arg in read
    )
    if x is None or not x.is_cuda or weight is None or bias is None:
        return False
    if not x.is_contiguous(memory_format=suggest_memory_format(x)):
        return False
    statistics = (weight if mean is None else mean, weight if variance is None else variance)
    backend = torch._C._select_batch_norm_backend(  # pyright: ignore
        x, weight, bias, *statistics, True, eps
    )
    return backend == torch._C._BatchNormBackend.Cudnn  # pyright: ignore


def reserved(x: Tensor) -> Tensor:
    """What cuDNN's forward reserves for its backward, like the traced `x` without data."""
    size_bytes = 0
    if x.is_cuda:
        size_bytes = torch._C._get_cudnn_batch_norm_reserve_space_size(x, True)  # pyright: ignore
    return x.new_empty(size_bytes, dtype=torch.uint8)


def _change(node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    """Give `node` the op `target`, which returns the reserve before the new statistics."""
    node.target, node.args = target, args
    for picked in list(node.users):
        index = picked.args[1]
        assert isinstance(index, int)
        picked.args = (node, index + (index >= RESERVE))
    before = node.meta["val"]
    reserve = reserved(args[0].meta["val"])
    node.meta["val"] = (*before[:RESERVE], reserve, *before[RESERVE:])
    with node.graph.inserting_after(node):
        kept = node.graph.call_function(operator.getitem, (node, RESERVE))
    kept.meta = {**node.meta, "val": reserve}
    for backward in list(_backward_of(node)):
        *read, _, eps, mask = backward.args
        backward.target = CHOSEN_BACKWARD
        backward.args = (*read, True, eps, mask, kept)


def _backward_of(node: fx.Node) -> Iterator[fx.Node]:
    """Backward nodes that read the mean that `node` has saved."""
    left = [user for user in node.users if user.args[1] == MEAN]
    while left:
        for user in left.pop().users:
            if user.target is TRACED_BACKWARD:
                yield user
            elif user.target is aten.detach.default:
                left.append(user)
