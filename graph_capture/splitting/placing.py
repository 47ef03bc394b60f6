"""Puts nodes in the places of others in a graph.

What other nodes read keeps its name, so that the rest of the training graph stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx


def picked(node: fx.Node, i: int, name: str, before: fx.Node | None = None) -> fx.Node:
    """A new node that picks result `i` of `node`, right after it or before another node."""
    graph = node.graph
    with graph.inserting_before(before) if before is not None else graph.inserting_after(node):
        made = graph.create_node("call_function", operator.getitem, (node, i), {}, name)
    made.meta = {**node.meta, "val": node.meta["val"][i]}
    return made


def take_place(old: fx.Node, new: fx.Node) -> None:
    """Let everyone read `new` in the place of `old`, under its name, and erase that."""
    old.replace_all_uses_with(new)
    name, meta = old.name, old.meta
    old.graph.erase_node(old)
    new.name = name
    if new.target is operator.getitem:
        new.meta = dict(meta)


def take_places(node: fx.Node, old: Iterable[fx.Node | None]) -> None:
    """Let results of `node`, in their order, take places; None where a result has none to take."""
    last = node
    for i, one in enumerate(old):
        if one is not None:
            # One of them may be what stands next, and goes as its place is taken.
            last = picked(node, i, one.name, before=last.next)
            take_place(one, last)


def erase_left(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase those of `nodes` that are still there and that nobody reads, readers first."""
    left = set(graph.nodes)  # those whose places were taken are gone
    for node in nodes:
        if node in left and not node.users:
            graph.erase_node(node)
