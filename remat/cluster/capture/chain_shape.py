"""What one forward of a chain shows: border, split layers, operations. Without torch itself."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

ChainPosition = Literal["first", "block", "last"]
"""A part of the chain: what comes before the blocks, one of them, and what comes behind them."""
CHAIN_POSITIONS: tuple[ChainPosition, ...] = ("first", "block", "last")
SplitRole = Literal["columns", "rows"]


@dataclass
class ChainShape:
    """What one forward showed.

    Attributes
    ----------
    block_args, block_kwargs : of the first block. border : what it returns.
    roles : of linear layers in the first block and behind the last, by path.
    gathered : modules whose result is read whole by layers that are split by columns, and layers
        that read something else.
    parameters : names by place. products_flops, attention_flops : of forward, of one block.
    heads : of queries and of keys, of each call of fused attention. unshared : why context parallel
        ranks cannot share one. unsplit : why tensor parallel ranks cannot share a block. Empty if
        they can.
    digest : of all ops with shapes and numbers.
    """

    block_args: tuple[Any, ...] = ()
    block_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    border: Tensor | None = None
    roles: dict[str, SplitRole] = field(default_factory=dict[str, SplitRole])
    gathered: dict[str, bool] = field(default_factory=dict[str, bool])
    parameters: dict[ChainPosition, set[str]] = field(
        default_factory=lambda: defaultdict[ChainPosition, set[str]](set)
    )
    products_flops: dict[ChainPosition, int] = field(
        default_factory=lambda: defaultdict[Any, int](int)
    )
    attention_flops: int = 0
    has_fused_attention: bool = False
    has_open_attention: bool = False
    heads: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    unshared: str = ""
    unsplit: str = ""
    digest: str = ""


def shares_heads(heads: tuple[int, int], tp: int, cp: int) -> bool:
    queries, keys = (n // tp for n in heads)
    if cp == 1:
        return True
    # Where there are more ranks than heads of keys, each such head goes to several ranks.
    return queries % cp == 0 and keys > 0 and (keys % cp == 0 or cp % keys == 0)
