"""What a step returns, where one tensor comes more than once in it, or a dataclass.

A model may return its last hidden state by itself and again among all of them, or return what it
keeps on an attribute. Eager then returns one tensor, whose gradients are added up before its own
backward runs. As two results of a graph it would be two tensors, and two gradients at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.utils._pytree as pytree
from torch import Tensor

from remat.graph_capture.tracing.records import closed, holds_opened

Leaf = TypeVar("Leaf")


@dataclass(frozen=True)
class Repeats:
    """A tree of results in which a tensor comes more than once, or a dataclass.

    Attributes
    ----------
    spec : of the tree. which : for each of its leaves, its index among the distinct ones.
    own : how many of the leaves are the module's results. The others are set on attributes.
    """

    spec: pytree.TreeSpec
    which: tuple[int, ...]
    own: int

    def gradients(self) -> dict[int, int]:
        """How many gradients come back for a result, by its index, where it is more than one."""
        times = Counter(self.which[: self.own])
        return {i: number for i, number in times.items() if number > 1}

    def of_leaves(self, distinct: Sequence[Leaf]) -> list[Leaf]:
        """For each leaf of the tree, what belongs to it of a list for the distinct ones."""
        return [distinct[i] for i in self.which]

    def tree(self, distinct: Sequence[Any]) -> Any:
        """The tree of results, from the distinct ones."""
        tree = pytree.tree_unflatten(self.of_leaves(distinct), self.spec)
        return closed(tree) if holds_opened(self.spec) else tree


def distinct_results(results: Any, own: int) -> tuple[Any, Repeats | None]:
    """The results with each tensor once, and how to make the tree of them again.

    Where no tensor repeats and no dataclass was opened, the results as they are, and None. `own` is
    as of `Repeats`.
    """
    leaves, spec = pytree.tree_flatten(results)
    seen: dict[int, int] = {}
    distinct: list[Any] = []
    which: list[int] = []
    for leaf in leaves:
        known = seen.get(id(leaf)) if isinstance(leaf, Tensor) else None
        which.append(len(distinct) if known is None else known)
        if known is None:
            seen[id(leaf)] = len(distinct)
            distinct.append(leaf)
    if len(distinct) == len(leaves) and not holds_opened(spec):
        return results, None
    return distinct, Repeats(spec, tuple(which), own)
