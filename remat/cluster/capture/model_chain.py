"""A model as a chain: an embedding, blocks one after another, and a head with the loss.

Blocks that run the same operations are of one kind, and planned once. An encoder and a decoder are
one chain of two lists of blocks, with what lies between them.

And what one forward of it shows (`watching.py`): border, split layers, operations.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
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


def _in_bfloat16(leaf: Any) -> Any:
    is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(torch.bfloat16) if is_float else leaf


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
class BlockShape:
    """What one forward showed of one block.

    `args`, `kwargs` : of its call; their leaves `borders` are what the block before it made.
    `with_gradient` : leaves that depend on parameters which train. `result` : what it returns.
    `trains` : whether backward reaches the block.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    borders: tuple[int, ...] = ()
    with_gradient: tuple[int, ...] = ()
    result: Any = None
    trains: bool = True

    @property
    def leaves(self) -> list[Any]:
        return pytree.tree_leaves((self.args, self.kwargs))

    @property
    def read(self) -> Tensor:
        """The border that it reads."""
        return self.leaves[self.borders[0]]

    def call(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with other leaves."""
        return pytree.tree_unflatten(leaves, pytree.tree_structure((self.args, self.kwargs)))


@dataclass
class ChainShape:
    """What one forward showed.

    `border` : what the first block returns. `kinds` : of each block in turn. `blocks` : the first
    one of each kind, and its number in the chain. `results` : of each block. `starts` : numbers of
    blocks that begin a list. `given_bytes` : of what blocks are given that no block made, and what
    they hand on. `roles` : of linear layers in those and behind
    the last, by path. `gathered` : modules whose result is read whole by layers that are split by
    columns, and layers that read something else. `parameters` : names by place. `products_flops`,
    `attention_flops` : of forward, by place. `heads` : of queries and of keys, of each call of
    fused attention. `unshared` : why context parallel ranks cannot share one. `unsplit` : why
    tensor parallel ranks cannot share a block. `unstaged`, `unrun` : why there are no stages, and
    why `remat.cluster.parallelize` does not run the chain, beginning with a way out. `unsent` : why
    it does not with stages or context parallel ranks. Empty if they can. `digest` : of all ops with
    shapes and numbers.
    """

    border: Tensor | None = None
    kinds: tuple[int, ...] = ()
    blocks: list[tuple[int, BlockShape]] = field(default_factory=list[tuple[int, BlockShape]])
    results: list[Any] = field(default_factory=list[Any])
    starts: list[int] = field(default_factory=lambda: [0])
    given_bytes: int = 0
    roles: dict[str, SplitRole] = field(default_factory=dict[str, SplitRole])
    gathered: dict[str, bool] = field(default_factory=dict[str, bool])
    parameters: dict[ChainPosition, set[str]] = field(
        default_factory=lambda: defaultdict[ChainPosition, set[str]](set)
    )
    products_flops: Counter[ChainPosition] = field(default_factory=Counter[ChainPosition])
    attention_flops: Counter[ChainPosition] = field(default_factory=Counter[ChainPosition])
    has_fused_attention: bool = False
    has_open_attention: bool = False
    heads: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    unshared: str = ""
    unsplit: str = ""
    unstaged: str = ""
    unsent: str = ""
    unrun: str = ""
    digest: str = ""
    looks_at_data: bool = False


def chain_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None,
    loss_fn: Callable[..., Any] | None, target: Any, pattern: str = "", *, is_whole: bool = True,
) -> ChainModel:  # fmt: skip
    """The chain of a model, with its parameters in bfloat16 and no storage.

    `pattern` : a glob over the paths of blocks; empty finds the largest list of blocks of one
    class, and with `is_whole` the lists beside it. `CaptureError` : no such list.
    """
    model = model.to("meta").train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                # As `stages.py` counts mixed precision: the masters in float32 are optimizer state.
                parameter.data = parameter.data.to(torch.bfloat16)
    if pattern:
        blocks = matching_blocks(model, pattern, "h100")
        _require_several(blocks)
    else:
        lists = _lists_of_blocks(model)
        chosen = lists if is_whole else [max(lists, key=_elements_of)]
        blocks = {path: block for one in chosen for path, block in one.items()}
    given = dict(kwargs or {})
    keep_no_cache(model)
    if "use_cache" in inspect.signature(model.forward).parameters:  # whatever its default is
        given.setdefault("use_cache", False)
    # As mixed precision casts what the model is given.
    args, given = pytree.tree_map(_in_bfloat16, (args, given))
    on_meta = pytree.tree_map(leaf_on_meta, (args, given, target))
    return ChainModel(model, blocks, on_meta[0], on_meta[1], loss_fn, on_meta[2])


def keep_no_cache(model: nn.Module) -> None:
    """Switch off `use_cache` of configs of transformers': it is for generation."""
    for module in model.modules():  # what wraps a model, as peft does, takes its config or none
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def tied_weights(chain: ChainModel, shape: ChainShape) -> tuple[str, ...]:
    """Parameters that two stages would share."""
    both = shape.parameters["first"] & shape.parameters["last"]
    # A weight that one block uses twice is in one stage all the same.
    count = Counter(id(p) for block in chain.blocks.values() for p in set(block.parameters()))
    names = chain.model.named_parameters()
    return tuple(name for name, p in names if name in both or count[id(p)] > 1)


def why_unstaged(chain: ChainModel, shape: ChainShape) -> str:
    """Why the chain has no stages, beginning with a way out; empty if it can have some."""
    if tied := tied_weights(chain, shape):
        return (
            f"untie {' and '.join(tied)}, or plan without stages with --pp 1: they are in two "
            "stages, which cannot share weights"
        )
    return shape.unstaged


def refuse_stages(chain: ChainModel, shape: ChainShape) -> None:
    if why := why_unstaged(chain, shape):
        raise CaptureError(why)


def loose_state(chain: ChainModel) -> str:
    """Why a parameter or buffer is no stage's, beginning with a way out; empty if there is none."""
    around = {path[:at] for path in chain.blocks for at in range(len(path)) if path[at] == "."}
    for name, _ in (*chain.model.named_parameters(), *chain.model.named_buffers()):
        owner = name.rpartition(".")[0]
        if not owner or owner in around:
            return (
                f"move {name} into a module that forward calls: it lies beside the blocks in no "
                "module of its own"
            )
    return ""


_LEAST_SHARE = 0.02  # of the largest list's parameters, which another list has to be planned as one


def _lists_of_blocks(model: nn.Module) -> list[dict[str, nn.Module]]:
    """Children of one module that have one class: the largest such list, and others beside it.

    They come in the order of the model, and the largest one alone if the others are small.
    """
    lists = list[tuple[str, dict[str, nn.Module]]]()
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        named = {f"{path}.{name}" if path else name: m for name, m in module.named_children()}
        held = {at: m for at, m in named.items() if any(True for _ in m.parameters())}
        usual = next((kind for kind, _ in Counter(map(type, held.values())).most_common(1)), None)
        blocks = {at: m for at, m in held.items() if type(m) is usual}
        # What is inside of a block is the block's own.
        if len(blocks) >= _LEAST_BLOCKS and not any(_lies_in(path, one) for _, one in lists):
            lists.append((path, blocks))
    # Layers without parts, as in a head of two, are blocks where nothing else is.
    found = [one for _, one in lists if any(True for b in one.values() for _ in b.children())]
    found = found or [one for _, one in lists]
    if not found:
        raise CaptureError(
            f"name the blocks with --blocks, such as 'layers.*': {type(model).__name__} has no "
            "list of blocks of one class, so it is not a chain that can be planned for a cluster"
        )
    most = max(map(_elements_of, found))
    return [one for one in found if _elements_of(one) >= _LEAST_SHARE * most]


def _lies_in(path: str, blocks: Mapping[str, nn.Module]) -> bool:
    return any(path == block or path.startswith(f"{block}.") for block in blocks)


def _elements_of(blocks: Mapping[str, nn.Module]) -> int:
    return sum(p.numel() for block in blocks.values() for p in block.parameters())


def block_facts(module: nn.Module) -> tuple[Any, ...]:
    """What equal blocks have in common before they run."""
    state = (
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()
    )
    return type(module), *state


def _require_several(blocks: Mapping[str, nn.Module]) -> None:
    if len(blocks) < _LEAST_BLOCKS:
        raise CaptureError(
            f"name all blocks with --blocks, such as 'layers.*': {next(iter(blocks))} is only one, "
            f"and a chain has {_LEAST_BLOCKS} or more"
        )
