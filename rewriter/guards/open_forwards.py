"""Forwards whose backward is still to come: what they have saved is held until then.

Where torch.compile breaks a model into several graphs, each finds held what the open forwards of
the others have saved. Dynamo's numbers of frames say neither that two graphs belong to one model
nor that a graph is called twice, so forwards are counted as they run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch.utils._pytree as pytree

from remat.rewriter.guards.backward import compiled_node


class _Open:
    """One forward of a graph. It lives as long as the autograd node of its results."""

    def __init__(self, graph: Hashable, number: int) -> None:
        self.graph, self.number = graph, number


class OpenForwards:
    """The forwards that are open, in the order in which they ran.

    A forward is closed by its backward, or when nothing can reach its results any more. After a
    backward with ``retain_graph=True`` it counts as closed, though what it saved is still there.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakSet[_Open] = weakref.WeakSet()
        self._number = 0

    def graphs(self) -> list[Any]:
        """The graphs of the open forwards, the earliest first."""
        return [one.graph for one in sorted(self._open, key=lambda one: one.number)]

    def watch(self, graph: Hashable, output: Any) -> None:
        """Count the forward of `graph` that has returned `output` as open."""
        node = next(filter(None, map(compiled_node, pytree.tree_leaves(output))), None)
        if node is None:
            return
        self._number += 1
        one = _Open(graph, self._number)
        self._open.add(one)
        node.register_hook(_closing(one, self._open))


def _closing(one: _Open, among: weakref.WeakSet[_Open]) -> Callable[..., None]:
    """A hook for an autograd node. It closes `one`, and keeps it alive as long as the node."""

    def close(*_: Any) -> None:
        among.discard(one)

    return close
