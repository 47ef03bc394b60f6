"""A block, or what follows all blocks, as one rank runs it: its weights, and its collectives.

Weights are the rank's parts. What runs between split layers has the rank's part of the sequence
(sequence parallel, Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198): what a norm returns
is gathered along the sequence, and the sum of a layer that is split by rows is scattered along it.
Context parallel ranks have a part of each sequence throughout, and share the heads of attention.
These modules are for planning: they run where collectives do nothing, and their results mean
nothing.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn

from remat.graph_capture.cluster.chain import ChainModel
from remat.graph_capture.cluster.chain_shape import ChainShape, SplitRole
from remat.graph_capture.cluster.heads_over_ranks import HeadsOverRanks
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.tracing.step_module import apply_loss

SEQUENCE = 1
"""The dimension of a batch and a border that counts tokens, along which they are split."""
# Torch 2.13 gave these two another name.
_gather_along: Any = getattr(collectives, "all_gather_single_autograd", None) or (
    collectives.all_gather_tensor_autograd
)
_scatter_along: Any = getattr(collectives, "reduce_scatter_single_autograd", None) or (
    collectives.reduce_scatter_tensor_autograd
)


class Gathers(nn.Module):
    """A module whose result, or whose input, is gathered along the sequence."""

    def __init__(self, inner: nn.Module, group: Any, *, behind: bool) -> None:
        super().__init__()
        self.inner, self.group, self.behind = inner, group, behind

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The inner module, with every token for all of what follows."""
        if self.behind:
            return _gather_along(self.inner(x, *args, **kwargs), SEQUENCE, self.group)
        return self.inner(_gather_along(x, SEQUENCE, self.group), *args, **kwargs)


class Scatters(nn.Module):
    """A layer split by rows: its result is summed over ranks, each of which keeps its tokens."""

    def __init__(self, inner: nn.Module, group: Any) -> None:
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, x: Tensor) -> Tensor:
        """The rank's tokens of the sum."""
        return _scatter_along(self.inner(x), "sum", SEQUENCE, self.group)


class OnRank(nn.Module):
    """A block of one rank, in which attention reaches over the context parallel ranks."""

    def __init__(self, inner: nn.Module, cp: int, group: Any) -> None:
        super().__init__()
        self.inner, self.cp, self.group = inner, cp, group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's result for the rank's tokens."""
        if self.cp == 1:
            return self.inner(*args, **kwargs)
        with HeadsOverRanks(self.group):
            return self.inner(*args, **kwargs)


def block_on_rank(
    chain: ChainModel, shape: ChainShape, tp: int, cp: int, tp_group: Any, cp_group: Any
) -> nn.Module:
    """The first block, split over so many ranks.

    Raises
    ------
    CaptureError : a weight has no equal parts.
    """
    path = chain.first_path
    inner = copy.deepcopy(chain.blocks[path])
    _split(inner, f"{path}.", shape, tp, tp_group)
    return OnRank(inner, cp, cp_group)


def border_on_rank(shape: ChainShape, tp: int) -> Tensor:
    """What a block reads on one rank: its part of the sequence."""
    assert shape.border is not None
    sizes = list(shape.border.shape)
    sizes[SEQUENCE] //= tp
    return torch.empty(sizes, dtype=shape.border.dtype, device="meta", requires_grad=True)


class Behind(nn.Module):
    """What follows the last block, with the loss. Its border is a parameter: it has a gradient."""

    def __init__(self, model: nn.Module, given: _Given, loss_fn: Any) -> None:
        super().__init__()
        self.model, self.given = model, given
        self.loss_fn = loss_fn

    def forward(self, args: Any, kwargs: Any, target: Any) -> Any:
        """The loss of the border."""
        return apply_loss(self.loss_fn, self.model(*args, **kwargs), target)


class _Passes(nn.Module):
    """In the place of a block: hands on what it reads."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


class _Given(nn.Module):
    """In the place of the last block: the border that it would return."""

    def __init__(self, border: Tensor) -> None:
        super().__init__()
        self.border = nn.Parameter(border.detach())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.border


def behind_on_rank(chain: ChainModel, shape: ChainShape, tp: int, tp_group: Any) -> nn.Module:
    """What follows the blocks, its vocabulary split over so many ranks.

    Raises
    ------
    CaptureError : a weight has no equal parts.
    """
    shared = {id(block): block for block in chain.blocks.values()}
    model = copy.deepcopy(chain.model, dict(shared))  # blocks go, so they are not copied
    given = _Given(border_on_rank(shape, tp))
    for path in chain.blocks:
        _put(model, path, given if path == chain.last_path else _Passes())
    _split(model, "", shape, tp, tp_group)
    return Behind(model, given, chain.loss_fn)


def _split(module: nn.Module, prefix: str, shape: ChainShape, tp: int, group: Any) -> None:
    if tp == 1:
        return
    for path, role in shape.roles.items():
        if path.startswith(prefix) and _has(module, path.removeprefix(prefix)):
            name = path.removeprefix(prefix)
            linear = module.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            _cut(linear, path, role, tp)
            if role == "rows":
                _put(module, name, Scatters(linear, group))
    for path, behind in shape.gathered.items():
        if path.startswith(prefix) and _has(module, path.removeprefix(prefix)):
            name = path.removeprefix(prefix)
            _put(module, name, Gathers(module.get_submodule(name), group, behind=behind))


def _cut(linear: nn.Linear, path: str, role: SplitRole, tp: int) -> None:
    """Leave one rank's part of the weights."""
    out, into = linear.weight.shape
    whole = out if role == "columns" else into
    if whole % tp:
        what = "results" if role == "columns" else "inputs"
        raise CaptureError(f"{path} has {whole} {what}, which {tp} ranks cannot share")
    sizes = (out // tp, into) if role == "columns" else (out, into // tp)
    linear.weight = nn.Parameter(linear.weight.new_empty(sizes))
    linear.out_features, linear.in_features = sizes
    bias = dict(linear.named_parameters(recurse=False)).get("bias")
    if bias is not None and role == "columns":
        linear.bias = nn.Parameter(bias.new_empty(sizes[0]))


def _has(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
