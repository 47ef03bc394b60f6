"""Runs a model's own forward up to its first block, and from behind its last one.

Whatever a model's forward does around its blocks is run as it stands, so no convention is asked of
it. Forward is left at the first block by an exception. What follows the last block is reached with
everything before it on the meta device, where it costs nothing, and with the border that the last
block has made in place of the meta one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from remat.graph_capture.cluster.on_meta import leaf_on_meta, state_on_meta
from remat.graph_capture.errors import CaptureError
from remat.rewriter.user_module.block_shells import with_replaced


# No `Exception`: a forward may catch those.
class Arrival(BaseException):
    """The call of the first block.

    Attributes
    ----------
    border : what it reads. args, kwargs : its other arguments, which all blocks are given.
    """

    def __init__(self, border: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(border, args, kwargs)  # a copy is made of these
        self.border, self.args_, self.kwargs = border, args, kwargs


class _Leaves(nn.Module):
    """In the place of the first block: ends forward there."""

    def forward(self, border: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise Arrival(border, args, kwargs)


class _Passes(nn.Module):
    """In the place of a block before the last one."""

    def forward(self, border: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return border


class _Resumes(nn.Module):
    """In the place of the last block: what it would return; ends what runs on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.border: Tensor | None = None
        self.on_meta = contextlib.ExitStack()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.on_meta.close()
        border, self.border = self.border, None
        assert border is not None
        return border


class Before:
    """What a model runs before its first block."""

    def __init__(self, model: nn.Module, first_block: nn.Module) -> None:
        self._shell = with_replaced(model, {first_block: _Leaves()})

    @property
    def module(self) -> nn.Module:
        """What is run: the model with another first block."""
        return self._shell

    def __call__(self, *args: Any, **kwargs: Any) -> Arrival:
        """The call of the first block, for a batch of the model."""
        try:
            self._shell(*args, **kwargs)
        except Arrival as found:
            # Its traceback would keep the frames of forward, and all that they name.
            return found.with_traceback(None)
        raise CaptureError(
            f"forward of {type(self._shell).__name__} does not reach its first block: name the "
            "blocks that each forward runs with --blocks"
        )


class Behind:
    """What a model runs behind its last block.

    Parameters
    ----------
    of_behind : modules that are run there, which stay as they are; all others go to meta.
    args : a microbatch, for its shapes.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], of_behind: Sequence[nn.Module],
        args: tuple[Any, ...],
    ) -> None:  # fmt: skip
        self._given = _Resumes()
        memo: dict[int, Any] = {id(block): _Passes() for block in blocks}
        memo |= {id(blocks[-1]): self._given} | {id(module): module for module in of_behind}
        memo |= state_on_meta(model, trains=False)
        self._shell = copy.deepcopy(model, memo)
        with torch.no_grad():
            self._args = pytree.tree_map(leaf_on_meta, args)

    def __call__(self, border: Tensor) -> Any:
        """What the model returns for such a border."""
        given = self._given
        given.border = border
        with given.on_meta:
            given.on_meta.enter_context(torch.device("meta"))
            return self._shell(*self._args)


class _DependsOn(TorchDispatchMode):
    """Follows what is computed from some tensors: from their contents, not from their shapes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        # Held, so that no other tensor gets the id of one.
        self.known = {id(tensor): tensor for tensor in tensors}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(id(leaf) in self.known for leaf in pytree.tree_leaves((args, kwargs))):
            made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            self.known.update((id(tensor), tensor) for tensor in made)
        return result


def arrival_of(before: Before, model: nn.Module, args: tuple[Any, ...], path: str) -> Arrival:
    """The first block's call for a microbatch, run once.

    Raises
    ------
    CaptureError : the block is given something beside the border that is computed from the batch
        or from parameters. Later stages have neither.
    """
    batch = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    with torch.no_grad(), _DependsOn([*batch, *model.parameters()]) as watched:
        found = before(*args)
    named = {f"argument {i + 1}": leaf for i, leaf in enumerate(found.args_)} | found.kwargs
    for name, given in named.items():
        if any(id(leaf) in watched.known for leaf in pytree.tree_leaves(given)):
            raise CaptureError(
                f"block {path} is given {name}, which is computed from the batch or from "
                "parameters, and later stages of a pipeline have neither: compute it in the "
                "blocks, or plan without stages with --pp 1"
            )
    return found
