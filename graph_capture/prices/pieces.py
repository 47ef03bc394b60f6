"""Prices of what may run in pieces: measured if the device is here, else of the captured ops."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import msgspec
from torch import fx

from remat.graph_capture.errors import option
from remat.graph_capture.graph import Choice, Op, Region, TrainingGraph, Value
from remat.graph_capture.splitting.regions import COUNTS, Found
from remat.graph_capture.splitting.work import captured_ops, workspace_bytes

PricedPieces = Callable[[Found], tuple[Mapping[str, Op], Sequence[Value]]]
"""From a region in pieces: its ops of ours by name, and the values of the graph with them."""
HEADS = ("head",)
IsExact = Callable[[Found], bool]
"""Whether the ops of a region, in the pieces that they are set to, give eager's bits."""


def with_regions(
    graph: TrainingGraph, found: Sequence[Found], priced: PricedPieces, is_exact: IsExact
) -> TrainingGraph:
    """`graph` with the regions found, each with its choices.

    Where eager's bits are asked for, numbers of pieces that do not give them are left out. A region
    without any is none; that is said of heads if the user has asked for it.
    """
    regions = [_region(graph, one, priced, is_exact) for one in found]
    for one, region in zip(found, regions, strict=True):
        if one.is_asked and not region.choices and one.kinds == HEADS:
            warnings.warn(
                f"the loss of {one.name} ({graph.name}) stays whole: in pieces, kernels give other "
                f"bits than eager here. {option('split', 'tolerance')} takes them",
                stacklevel=2,
            )
    return msgspec.structs.replace(graph, regions=tuple(one for one in regions if one.choices))


def _region(graph: TrainingGraph, found: Found, priced: PricedPieces, is_exact: IsExact) -> Region:
    choices: list[Choice] = []
    for pieces in COUNTS:
        found.set_pieces(pieces)
        if not found.is_exact or is_exact(found):
            ops, values = priced(found)
            choices.append(_choice(graph, found, ops, values))
    return Region(found.name, found.dropped, tuple(choices), found.kinds)


def _choice(
    graph: TrainingGraph, found: Found, ours: Mapping[str, Op], values: Sequence[Value]
) -> Choice:
    if found.is_exact:
        ours = _no_cheaper(graph, found, ours)
    ops = [(place, ours.get(op.name) or _as_captured(graph, op)) for place, op in found.added]
    made = {name for _, op in ops for name in op.outputs}
    own = tuple(value for value in values if value.name in made)
    return Choice(found.pieces, found.is_exact, tuple(ops), own)


def _no_cheaper(graph: TrainingGraph, found: Found, ours: Mapping[str, Op]) -> Mapping[str, Op]:
    """`ours` at the time of the captured ops at least: they do the same work, and some of it twice.

    Where blocks fit into caches, or a clock was off, they are priced below. A step that fits as it
    was captured stays so.
    """
    us = sum(op.cost_us for op in ours.values())
    return ours if us >= _whole_us(graph, found) else _taking(_whole_us(graph, found), ours)


def _whole_us(graph: TrainingGraph, found: Found) -> float:
    """What the ops take that the pieces replace."""
    dropped = set(found.dropped)
    return sum(op.cost_us for op in graph.ops if op.name in dropped)


def _taking(all_us: float, ours: Mapping[str, Op]) -> Mapping[str, Op]:
    """`ours`, which take as long as that together."""
    factor = all_us / sum(op.cost_us for op in ours.values())
    return {
        name: msgspec.structs.replace(op, cost_us=factor * op.cost_us) for name, op in ours.items()
    }


def _as_captured(graph: TrainingGraph, op: Op) -> Op:
    """An op that reads other values than before, such as an update, at its captured price."""
    same = [one for one in graph.ops if one.target == op.target]
    before = next((one for one in same if one.name == op.name), same[0])
    return msgspec.structs.replace(op, cost_us=before.cost_us, price=before.price)


def modelled(
    captured: TrainingGraph, launch_us: float, rounded: Callable[[int], int]
) -> PricedPieces:
    """Prices from those of the ops that the pieces replace, for a device that is not here."""
    costs = {op.name: op.cost_us for op in captured.ops}

    def priced(found: Found) -> tuple[Mapping[str, Op], Sequence[Value]]:
        ops = {op.name: op for op in found.joint.graph.ops}
        more_us = (found.pieces - 1) * launch_us
        ours = {
            node.name: msgspec.structs.replace(
                ops[node.name],
                cost_us=_cost_us(captured_ops(part, node, found.pieces), costs, more_us),
                workspace_bytes=rounded(workspace_bytes(part, node, found.pieces)),
                price="modelled",
            )
            for part, node in found.by_node()
        }
        return ours, [
            msgspec.structs.replace(value, size_bytes=rounded(value.size_bytes))
            for value in found.joint.graph.values
        ]

    return priced


def hoped(captured: TrainingGraph, rounded: Callable[[int], int]) -> PricedPieces:
    """The least prices of all: pieces take as long as what they replace, and nothing twice."""
    modelled_ones = modelled(captured, 0.0, rounded)

    def priced(found: Found) -> tuple[Mapping[str, Op], Sequence[Value]]:
        ours, values = modelled_ones(found)
        us = sum(op.cost_us for op in ours.values())
        least_us = min(us, _whole_us(captured, found))
        return (_taking(least_us, ours) if us > 0 else ours), values

    return priced


def _cost_us(nodes: Sequence[fx.Node], costs: Mapping[str, float], more_us: float) -> float:
    """Time of captured nodes, and of the launches of each beyond one."""
    ran = [node for node in nodes if node.name in costs]
    return sum(costs[node.name] for node in ran) + more_us * len(ran)
