"""A model as a chain: an embedding, equal blocks one after another, and a head with the loss.

And what one forward of it shows (`watching.py`): border, split layers, operations.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from remat.cluster.parts import ChainPosition
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.blocks import matching_blocks


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


SplitRole = Literal["columns", "rows"]


@dataclass
class ChainShape:
    """What one forward showed.

    `block_args`, `block_kwargs` : of the first block. `border` : what it returns. `roles` : of
    linear layers in the first block and behind the last, by path. `gathered` : modules whose result
    is read whole by layers that are split by columns, and layers that read something else.
    `parameters` : names by place. `products_flops`, `attention_flops` : of forward, of one block.
    `heads` : of queries and of keys, of each call of fused attention. `unshared` : why context
    parallel ranks cannot share one. `unsplit` : why tensor parallel ranks cannot share a block.
    Empty if they can. `digest` : of all ops with shapes and numbers.
    """

    block_args: tuple[Any, ...] = ()
    block_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    border: Tensor | None = None
    roles: dict[str, SplitRole] = field(default_factory=dict[str, SplitRole])
    gathered: dict[str, bool] = field(default_factory=dict[str, bool])
    parameters: dict[ChainPosition, set[str]] = field(
        default_factory=lambda: defaultdict[ChainPosition, set[str]](set)
    )
    products_flops: Counter[ChainPosition] = field(default_factory=Counter[ChainPosition])
    attention_flops: int = 0
    has_fused_attention: bool = False
    has_open_attention: bool = False
    heads: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    unshared: str = ""
    unsplit: str = ""
    digest: str = ""


def chain_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None,
    loss_fn: Callable[..., Any] | None, target: Any, pattern: str = "",
) -> ChainModel:  # fmt: skip
    """The chain of a model, with its parameters in bfloat16 and no storage.

    `pattern` : a glob over the paths of blocks; empty finds the longest list of equal ones.
    `CaptureError` : no such list, or the blocks are not equal.
    """
    model = model.to("meta").train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                # As `stages.py` counts mixed precision: the masters in float32 are optimizer state.
                parameter.data = parameter.data.to(torch.bfloat16)
    blocks = matching_blocks(model, pattern, "h100") if pattern else _longest_list(model)
    _require_equal(blocks)
    given = dict(kwargs or {})
    if "use_cache" in inspect.signature(model.forward).parameters:  # of transformers'
        given.setdefault("use_cache", False)  # a cache is for generation, and blocks would fill it
    on_meta = pytree.tree_map(leaf_on_meta, (args, given, target))
    return ChainModel(model, blocks, on_meta[0], on_meta[1], loss_fn, on_meta[2])


def tied_weights(chain: ChainModel, shape: ChainShape) -> tuple[str, ...]:
    """Parameters that two stages would share."""
    both = shape.parameters["first"] & shape.parameters["last"]
    # A weight that one block uses twice is in one stage all the same.
    count = Counter(id(p) for block in chain.blocks.values() for p in set(block.parameters()))
    names = chain.model.named_parameters()
    return tuple(name for name, p in names if name in both or count[id(p)] > 1)


def refuse_tied(tied: Sequence[str]) -> None:
    if tied:
        raise CaptureError(
            f"untie {' and '.join(tied)}, or plan without stages with --pp 1: they are in two "
            "stages, which cannot share weights"
        )


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
            f"name the blocks with --blocks, such as 'layers.*': {type(model).__name__} has no "
            "list of equal blocks, so it is not a chain that can be planned for a cluster"
        )
    return found


def _block_facts(module: nn.Module) -> tuple[Any, ...]:
    state = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
    return type(module), state


def _require_equal(blocks: Mapping[str, nn.Module]) -> None:
    first, *others = blocks
    if not others:
        raise CaptureError(
            f"name all blocks with --blocks, such as 'layers.*': {first} is only one, and a chain "
            f"has {_LEAST_BLOCKS} or more"
        )
    for path in others:
        if _block_facts(blocks[path]) != _block_facts(blocks[first]):
            raise CaptureError(
                f"name equal blocks with --blocks: block {path} differs from block {first} in "
                "class or parameters, and a cluster is planned for a chain of equal ones"
            )
