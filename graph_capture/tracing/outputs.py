"""What a step returns, where one tensor comes more than once in it, or a dataclass.

Eager returns one tensor, with gradients added up before its backward; two results would be two.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from remat.graph_capture.torch_private.core import pytree

_Context = tuple[Any, tuple[str, ...]]


class _FlatDataclass:
    """A container that torch knows, with what a dataclass holds, fields or not, by name."""

    # For the trace only: to register the dataclass would change how other code walks through it.
    def __init__(self, kind: type, values: dict[str, Any]) -> None:
        self.kind, self.values = kind, values

    def closed(self) -> Any:
        made = object.__new__(self.kind)  # as `copy.copy`: no `__init__`, of frozen ones either
        for name, value in self.values.items():
            object.__setattr__(made, name, value)
        return made


def _flat(one: _FlatDataclass) -> tuple[list[Any], _Context]:
    return list(one.values.values()), (one.kind, tuple(one.values))


def _named(one: _FlatDataclass) -> tuple[list[tuple[Any, Any]], _Context]:
    values, context = _flat(one)
    keys: list[Any] = [pytree.GetAttrKey(name) for name in one.values]
    return list(zip(keys, values, strict=True)), context


def _made(values: Any, context: Hashable) -> _FlatDataclass:
    kind, names = context  # pyright: ignore
    return _FlatDataclass(kind, dict(zip(names, values, strict=True)))


pytree.register_pytree_node(_FlatDataclass, _flat, _made, flatten_with_keys_fn=_named)


def _is_plain_dataclass(leaf: Any) -> bool:
    is_one = dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, Tensor, nn.Module))
    return is_one and type(leaf) not in pytree.SUPPORTED_NODES


def open_dataclass(leaf: Any) -> Any:
    """A dataclass that torch does not know as a container that it knows; all else as it is."""
    if not _is_plain_dataclass(leaf):
        return leaf
    fields = [field.name for field in dataclasses.fields(leaf)]
    # What was set beside the fields reaches the caller too.
    others = [name for name in getattr(leaf, "__dict__", ()) if name not in fields]
    names = (name for name in (*fields, *others) if hasattr(leaf, name))
    return _FlatDataclass(type(leaf), {name: getattr(leaf, name) for name in names})


def flatten_dataclasses(tree: Any) -> Any:
    def open_leaf(leaf: Any) -> Any:
        opened = open_dataclass(leaf)
        if opened is not leaf:
            held = opened.values.items()
            opened.values = {name: flatten_dataclasses(value) for name, value in held}
        return opened

    if not any(map(_is_plain_dataclass, pytree.tree_leaves(tree))):
        return tree
    return pytree.tree_map(open_leaf, tree)


def leaves_in(tree: Any) -> list[Any]:
    return pytree.tree_leaves(flatten_dataclasses(tree))


def _unflatten_dataclasses(tree: Any) -> Any:
    def close(part: Any) -> Any:
        if not isinstance(part, _FlatDataclass):
            return part
        values = {k: _unflatten_dataclasses(v) for k, v in part.values.items()}
        return _FlatDataclass(part.kind, values).closed()

    return pytree.tree_map(close, tree, is_leaf=lambda part: isinstance(part, _FlatDataclass))


def _has_flat_dataclass(spec: pytree.TreeSpec) -> bool:
    return spec.type is _FlatDataclass or any(map(_has_flat_dataclass, spec.children()))


_Leaf = TypeVar("_Leaf")


@dataclass(frozen=True)
class DuplicateOutputs:
    spec: pytree.TreeSpec
    which: tuple[int, ...]  # for each leaf of the tree, its index among the distinct ones
    own: int  # leaves that are the module's results; the others are set on attributes

    def gradients(self) -> dict[int, int]:
        """By index of a result, how many gradients come back for it, where more than one."""
        times = Counter(self.which[: self.own])
        return {i: number for i, number in times.items() if number > 1}

    def of_leaves(self, distinct: Sequence[_Leaf]) -> list[_Leaf]:
        return [distinct[i] for i in self.which]

    def tree(self, distinct: Sequence[Any]) -> Any:
        tree = pytree.tree_unflatten(self.of_leaves(distinct), self.spec)
        return _unflatten_dataclasses(tree) if _has_flat_dataclass(self.spec) else tree


def distinct_results(results: Any, own: int) -> tuple[Any, DuplicateOutputs | None]:
    """The results with each tensor once; None beside them where they can stay as they are."""
    leaves, spec = pytree.tree_flatten(results)
    seen, distinct, which = dict[int, int](), list[Any](), list[int]()
    for leaf in leaves:
        known = seen.get(id(leaf)) if isinstance(leaf, Tensor) else None  # numbers may be equal
        which.append(len(distinct) if known is None else known)
        if known is None:
            seen[id(leaf)] = len(distinct)
            distinct.append(leaf)
    if len(distinct) == len(leaves) and not _has_flat_dataclass(spec):
        return results, None
    return distinct, DuplicateOutputs(spec, tuple(which), own)
