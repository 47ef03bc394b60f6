"""How many bytes each part of a split backward has live at once, as its code frees them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from remat.rewriter.graphs.handed_over import marks
from remat.rewriter.split_backward.dependencies import Dependencies, Storage, is_mark


@dataclass(frozen=True)
class SplitBytes:
    """Of one microbatch in one block, parameters apart, without workspaces of ops.

    Attributes
    ----------
    inputs : the most in I, with all that backward is given. held : from I to W. weights : the most
        in W, with what is held.
    """

    inputs: int
    held: int
    weights: int


def most_live_bytes(part: fx.GraphModule, resident: Collection[str] = ()) -> int:
    """The most that a part has live.

    Each storage is freed behind the last op that reads it, and results stay.

    Parameters
    ----------
    part : I or W, as `split_graph` makes it. resident : names of inputs that cost nothing.
    """
    facts = Dependencies(part.graph)
    free = {s for n in part.graph.nodes if _is_free(n, resident) for s in facts.storages[n]}
    last = _last_uses(part, facts)
    given = {s for n in part.graph.find_nodes(op="placeholder") for s in facts.storages[n]} - free
    most = sum(map(facts.bytes_of, given))
    live = given & last.keys()
    for place, node in enumerate(part.graph.nodes):
        if node.op == "call_function" and not is_mark(node):
            live |= facts.storages[node] - free
            most = max(most, sum(map(facts.bytes_of, live)))
        live = {s for s in live if last.get(s, place) > place or node.op == "placeholder"}
    return most


def _is_free(node: fx.Node, resident: Collection[str]) -> bool:
    return node.op == "get_attr" or (node.op == "placeholder" and node.name in resident)


def _last_uses(part: fx.GraphModule, facts: Dependencies) -> dict[Storage, int]:
    """By storage, the place of the node that needs it last.

    Results are needed to the end, but those that marks hand over, as W does with all.
    """
    last: dict[Storage, int] = {}
    hands_over = bool(marks(part.graph))
    for place, node in enumerate(part.graph.nodes):
        if node.op != "output" or not hands_over:
            last |= {s: place for one in node.all_input_nodes for s in facts.storages[one]}
    return last
