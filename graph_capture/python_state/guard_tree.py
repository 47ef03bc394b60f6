"""Many objects compared in one call into C++, by the guards that dynamo makes for its own frames.

A comparison takes 10 ns for a dictionary and 40 ns for a tensor; in Python, one for each entry of a
dictionary takes 20 ns. `torch._C._dynamo.guards` is private to torch; the tests run it on each
release that is supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import GuardManager, RootGuardManager
from torch._dynamo.guards import GuardManagerType

PART = 64
"""Objects below one node of the tree. To add one, torch looks at all that are there."""


def unwritten(dictionaries: Sequence[dict[Any, Any]]) -> Callable[[], bool]:
    """A function that is true while nothing is written to any of the dictionaries.

    A dictionary has another version after each write that puts another object into it. So this may
    be false where all holds what it held, but not true where something holds another thing.
    """

    def add(node: GuardManager, dictionary: dict[Any, Any]) -> None:
        # What dynamo would print of a guard that fails: nobody reads it here.
        node.add_dict_version_guard(dictionary, [""], None)

    return _tree(dictionaries, add)


def same_facts(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """A function that is true while the tensors are as they are now.

    Their type, dtype, device, shape, strides, and whether they require a gradient.
    """

    def add(node: GuardManager, tensor: Tensor) -> None:
        # Lists of numbers, unlike what torch's stub says.
        sizes: Any = list(tensor.shape)
        strides: Any = list(tensor.stride())
        keys = torch._C._dispatch_keys(tensor)
        node.add_tensor_match_guard(tensor, sizes, strides, "", [""], None, type(tensor), keys)

    return _tree(tensors, add)


def _tree(objects: Sequence[Any], add: Callable[[GuardManager, Any], None]) -> Callable[[], bool]:
    parts = tuple(tuple(objects[i : i + PART]) for i in range(0, len(objects), PART))
    root = RootGuardManager()
    for part, node in _nodes_below(root, parts):
        for one, leaf in _nodes_below(node, part):
            add(leaf, one)
    return functools.partial(root.check, parts)


def _nodes_below(node: GuardManager, values: tuple[Any, ...]) -> list[tuple[Any, GuardManager]]:
    """Each item of a tuple, and the node for it."""
    kind: Any = GuardManagerType.GUARD_MANAGER
    return [
        (value, node.tuple_getitem_manager(i, "", value, kind)) for i, value in enumerate(values)
    ]


@functools.cache
def versions_tell() -> bool:
    """Whether this Python tells of each write to a dictionary: tried, as it is not documented."""
    tried: dict[str, Any] = {"key": None}
    same = unwritten([tried])
    before = same()
    tried["key"] = same
    return before and not same()
