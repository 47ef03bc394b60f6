"""The leaves of a batch or a result, each with its path.

Torch gives paths only through containers that were registered with names for their parts. Many
libraries register theirs without, such as the outputs of diffusers. Parts of those are numbered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.utils._pytree as pytree

Path = tuple[Any, ...]


def leaves_with_paths(tree: Any) -> list[tuple[Path, Any]]:
    """All leaves in the order of `tree_flatten`, each with its path as `keystr` reads it."""
    return list(_below((), tree))


def _below(path: Path, tree: Any) -> Iterator[tuple[Path, Any]]:
    # By number: torch's function refers to itself and to this one, so that a tree in it would live
    # on until Python collects garbage, with all of a model's result.
    whole = id(tree)
    parts, spec = pytree.tree_flatten(tree, is_leaf=lambda part: id(part) != whole)
    if spec.is_leaf():
        yield path, tree
        return
    named = pytree.SUPPORTED_NODES[spec.type].flatten_with_keys_fn
    keys = (
        [pytree.SequenceKey(i) for i in range(len(parts))]
        if named is None
        else [key for key, _ in named(tree)[0]]
    )
    for key, part in zip(keys, parts, strict=True):
        yield from _below((*path, key), part)
