"""Prices of what may run in pieces: measured if the device is here, else of the captured ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from torch import fx

from remat.graph_capture.graph import Choice, Op, Region, TrainingGraph, Value
from remat.graph_capture.splitting.regions import COUNTS, Found, set_pieces

PricedPieces = Callable[[Found, int], tuple[Mapping[str, Op], Sequence[Value]]]
"""From a region and a number of pieces: its ops by name, and the values of the graph with them."""


IsExact = Callable[[Found], bool]
"""Whether the ops of a region, in the pieces that they are set to, give eager's bits."""


def with_regions(
    graph: TrainingGraph, found: Sequence[Found], priced: PricedPieces, is_exact: IsExact
) -> TrainingGraph:
    """`graph` with the regions found, each with its choices.

    Where eager's bits are asked for, numbers of pieces that do not give them are left out.
    """
    regions = tuple(_region(one, priced, is_exact) for one in found)
    return msgspec.structs.replace(graph, regions=regions)


def _region(found: Found, priced: PricedPieces, is_exact: IsExact) -> Region:
    choices: list[Choice] = []
    for pieces in COUNTS:
        set_pieces(found.nodes, pieces)
        if not found.is_exact or is_exact(found):
            choices.append(_choice(found, pieces, priced))
    return Region(found.name, found.ops, tuple(choices))


def _choice(found: Found, pieces: int, priced: PricedPieces) -> Choice:
    ops, values = priced(found, pieces)
    own = [ops[node.name] for node in found.nodes]
    made = {name for op in own for name in op.outputs}
    return Choice(
        pieces,
        found.is_exact,
        tuple((found.places[op.name], op) for op in own),
        tuple(value for value in values if value.name in made),
    )


def modelled(
    captured: TrainingGraph, launch_us: float, rounded: Callable[[int], int]
) -> PricedPieces:
    """Prices from those of the ops that the pieces replace, for a device that is not here."""

    def priced(found: Found, pieces: int) -> tuple[Mapping[str, Op], Sequence[Value]]:
        ops = {op.name: op for op in found.joint.graph.ops}
        costs = {op.name: op.cost_us for op in captured.ops}
        workspace_bytes = rounded(_workspace_bytes(found, pieces))
        return {
            node.name: msgspec.structs.replace(
                ops[node.name],
                cost_us=_cost_us(found, node, costs, (pieces - 1) * launch_us),
                workspace_bytes=workspace_bytes,
                price="modelled",
            )
            for node in found.nodes
        }, [
            msgspec.structs.replace(value, size_bytes=rounded(value.size_bytes))
            for value in found.joint.graph.values
        ]

    return priced


def _cost_us(
    found: Found, node: fx.Node, costs: Mapping[str, float], more_launches_us: float
) -> float:
    """Time of the captured ops that an op of ours runs, and of the launches beyond one of each."""
    ran = [one for one in _captured_ops(found, node) if one.name in costs]
    return sum(costs[one.name] for one in ran) + more_launches_us * len(ran)


def _captured_ops(found: Found, node: fx.Node) -> list[fx.Node]:
    """The nodes whose work an op of ours does: backward makes the logits again."""
    head = found.head
    if node is found.nodes[0]:
        return head.forward
    ends = (head.of_x, head.of_weight, head.of_bias)
    made = {node.name, *(user.name for user in node.users)}
    own = [one for one in ends if one is not None and one.name in made]
    shared = [one for one in head.backward if one not in ends]
    return [*(one for one in head.forward if one is not head.loss), *shared, *own]


def _workspace_bytes(found: Found, pieces: int) -> int:
    """The most bytes that one piece has live: three blocks in the dtype of the loss.

    They are, in backward, the logarithms of the probabilities, their gradient and that of the
    logits; in forward it is less.
    """
    value = found.head.softmax.meta["val"]
    return 3 * (-(-value.numel() // pieces)) * value.element_size()
