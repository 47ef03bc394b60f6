"""The mark in a backward graph where gradients are final, and code that stops at each mark.

Backward is then a generator. At each mark it hands out gradients, lets go of them, and waits until
it is asked to go on. See `rewriter/gradients/handing_over.py` for who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx.node import has_side_effect

Handed = tuple[tuple[int, ...], list[Any]]
"""Places of gradients among the results of backward, and the gradients."""
Steps = Callable[[list[Any]], Iterator[Handed]]


@has_side_effect
def hand_over(places: Sequence[int], gradients: Sequence[Tensor]) -> None:
    """The mark. A backward graph that is run as it stands returns all gradients at its end."""


def marks(graph: fx.Graph) -> list[fx.Node]:
    """The marks of a graph, in their order."""
    return graph.find_nodes(op="call_function", target=hand_over)


def places_handed(graph: fx.Graph) -> tuple[tuple[int, ...], ...]:
    """For each mark the places that it hands over, then those that are left to the end."""
    found = [_places(mark) for mark in marks(graph)]
    results: Any = graph.output_node().args[0]
    handed = {place for places in found for place in places}
    rest = (i for i, r in enumerate(results) if isinstance(r, fx.Node) and i not in handed)
    return (*found, tuple(rest))


def _places(mark: fx.Node) -> tuple[int, ...]:
    places: Any = mark.args[0]
    return tuple(places)
