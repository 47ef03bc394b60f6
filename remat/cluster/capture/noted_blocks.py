"""Blocks of a chain side by side, as one forward showed them: kinds, and what each hands on."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from remat.cluster.capture.model_chain import BlockShape, ChainShape, block_facts
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.torch_private.core import pytree

_MOST_KINDS = 16  # of blocks: each is captured and solved apart
OTHER_BLOCKS = "name other blocks with --blocks, or plan one rank with remat run --sharding"


@dataclass
class NotedPart:
    """What runs in one block, or in one part beside them."""

    parameters: set[str] = field(default_factory=set[str])
    products_flops: int = 0
    attention_flops: int = 0
    hash: Any = field(default_factory=hashlib.sha256)
    # Held, so that no other tensor gets the id of one.
    numbers: dict[int, tuple[int, Tensor]] = field(default_factory=dict[int, tuple[int, Tensor]])

    def said(self, leaf: Any) -> str:
        """Of a tensor also which one it is, by when it was first seen here."""
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        number, _ = self.numbers.setdefault(id(leaf), (len(self.numbers), leaf))
        return f"{leaf.dtype}{tuple(leaf.shape)} of {number}"


def hand_on(blocks: Sequence[BlockShape], trained: Collection[int]) -> Iterator[int]:
    """Leave out of borders what blocks only hand on: it is there once for all of them.

    `trained` : ids of tensors that depend on parameters which train. Gives the blocks that do.
    """
    for number, block in enumerate(blocks):
        leaves = block.leaves
        result = {id(leaf) for leaf in pytree.tree_leaves(block.result)}
        own = tuple(i for i in block.borders if id(leaves[i]) not in result)
        if own and own != block.borders:
            handed = (i for i in block.borders if i not in own)
            reached = (i for i in handed if id(leaves[i]) in trained)
            block.with_gradient = tuple(sorted((*block.with_gradient, *reached)))
            block.borders = own
            yield number
    for block, behind in pairwise(blocks):
        # The first block of a list has its border where the next one has it.
        if not block.borders:
            at = behind.borders
            block.borders = at if at and max(at) < len(block.leaves) else (0,)
            block.with_gradient = tuple(i for i in block.with_gradient if i not in block.borders)


def number_kinds(
    shape: ChainShape, modules: Sequence[nn.Module], blocks: Sequence[BlockShape],
    noted: Sequence[NotedPart],
) -> None:  # fmt: skip
    """Write into `shape` which blocks run the same operations on tensors of the same places."""
    known, kinds = dict[Any, int](), list[int]()
    for number, (module, one, part) in enumerate(zip(modules, blocks, noted, strict=True)):
        key = block_facts(module), part.hash.digest(), one.borders, one.with_gradient, one.trains
        if key not in known:
            known[key] = len(known)
            shape.blocks.append((number, one))
        kinds.append(known[key])
    if len(known) > _MOST_KINDS:
        raise CaptureError(
            f"{OTHER_BLOCKS}: {len(known)} of {len(kinds)} blocks run operations of their own, and "
            f"at most {_MOST_KINDS} kinds are planned"
        )
    shape.kinds = tuple(kinds)
    shape.results = [one.result for one in blocks]
    shape.given_bytes = sum(_given_bytes(blocks).values())
    if len({one.read.shape for _, one in shape.blocks}) > 1:
        shape.unstaged = shape.unstaged or (
            "plan without stages with --pp 1: blocks read tensors of different shapes, which "
            "stages do not send"
        )


def _given_bytes(blocks: Sequence[BlockShape]) -> dict[int, int]:
    """By its id, each tensor that blocks are given beside their borders."""
    return {
        id(leaf): leaf.numel() * leaf.element_size()
        for block in blocks
        for i, leaf in enumerate(block.leaves)
        if isinstance(leaf, Tensor) and i not in block.borders
    }


def why_unrun(shape: ChainShape, blocks: Mapping[str, BlockShape]) -> str:
    """What `remat.cluster.parallelize` asks of a chain beyond what its plan needs."""
    first = next(iter(blocks))
    for (at, block), kind in zip(blocks.items(), shape.kinds, strict=True):
        if not isinstance(block.result, Tensor):
            return f"return one tensor from block {at}: it returns a {type(block.result).__name__}"
        if block.borders != (0,):
            return f"give block {at} what the block before it makes as its first argument alone"
        if kind:
            return f"make all blocks alike: block {at} runs other operations than block {first}"
    return ""


def are_given_alike(first: BlockShape, block: BlockShape) -> bool:
    """Whether a block is given what the first one is, beside its border."""
    at = block.borders or (0,)
    known, given = (
        [leaf for i, leaf in enumerate(one.leaves) if i not in at] for one in (first, block)
    )
    return len(known) == len(given) and all(
        # Tensors have no values here to compare.
        a is b or (not isinstance(a, Tensor) and a == b)
        for a, b in zip(known, given, strict=True)
    )
