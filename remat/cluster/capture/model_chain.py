"""A model as a chain: an embedding, equal blocks one after another, and a head with the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.blocks import matching_blocks
from remat.graph_capture.tracing.step_module import apply_loss


def state_on_meta(model: nn.Module, *, trains: bool = True) -> dict[int, Any]:
    """By id, each parameter and buffer without storage: a memo of `copy.deepcopy`."""
    found: dict[int, Any] = {}
    for p in model.parameters():
        found[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=trains and p.requires_grad)
    for buffer in model.buffers():
        found[id(buffer)] = buffer.to("meta")
    return found


def leaf_on_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


_LEAST_BLOCKS = 2


@dataclass(frozen=True)
class ChainModel:
    model: nn.Module
    blocks: dict[str, nn.Module]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: Callable[..., Any] | None
    target: Any

    @property
    def first_path(self) -> str:
        """Of the block that stands for all."""
        return next(iter(self.blocks))

    @property
    def last_path(self) -> str:
        return list(self.blocks)[-1]

    def loss(self) -> Any:
        return apply_loss(self.loss_fn, self.model(*self.args, **self.kwargs), self.target)


def chain_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None,
    loss_fn: Callable[..., Any] | None, target: Any, pattern: str = "",
) -> ChainModel:  # fmt: skip
    """The chain of a model, with its parameters in bfloat16 and no storage.

    Parameters
    ----------
    pattern : a glob over the paths of blocks; empty finds the longest list of equal ones.

    Raises
    ------
    CaptureError : no such list, or the blocks are not equal.
    """
    model = model.to("meta").train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                # As `stages.py` counts mixed precision: the masters in float32 are optimizer state.
                parameter.data = parameter.data.to(torch.bfloat16)
    blocks = matching_blocks(model, pattern, "h100") if pattern else _longest_list(model)
    _require_equal(blocks)
    on_meta = pytree.tree_map(leaf_on_meta, (args, dict(kwargs or {}), target))
    return ChainModel(model, blocks, on_meta[0], on_meta[1], loss_fn, on_meta[2])


def _longest_list(model: nn.Module) -> dict[str, nn.Module]:
    """The longest run of children of one module that have one class and equal parameters."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        alike = Counter(_block_facts(child) for child in module.children())
        usual = next((facts for facts, _ in alike.most_common(1)), None)
        equal = {
            f"{path}.{name}" if path else name: child
            for name, child in module.named_children()
            if _block_facts(child) == usual and any(True for _ in child.parameters())
        }
        if len(equal) > len(found):
            found = equal
    if len(found) < _LEAST_BLOCKS:
        raise CaptureError(
            f"{type(model).__name__} has no list of equal blocks, so it is no chain that a cluster "
            "is planned for: name its blocks with --blocks, such as 'layers.*'"
        )
    return found


def _block_facts(module: nn.Module) -> tuple[Any, ...]:
    state = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
    return type(module), state


def _require_equal(blocks: Mapping[str, nn.Module]) -> None:
    paths: Iterable[str] = iter(blocks)
    first, *others = paths
    if not others:
        raise CaptureError(
            f"{first} is one block alone, and a chain has {_LEAST_BLOCKS} or more: name all with "
            "--blocks, such as 'layers.*'"
        )
    for path in others:
        if _block_facts(blocks[path]) != _block_facts(blocks[first]):
            raise CaptureError(
                f"block {path} differs from block {first} in class or parameters, and a cluster is "
                "planned for a chain of equal blocks: name equal ones with --blocks"
            )
