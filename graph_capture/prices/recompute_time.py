"""The step with its forward computed again in segments: what computing again really takes.

Prices of single ops know nothing of how ops stand in a step: results that are dropped soon leave
their memory, near the core, to the next; a stretch that is made again and held is written to memory
farther away, and reads what was kept for long; views are replayed. So one step that recomputes is
run, that of Chen et al. (Training Deep Nets with Sublinear Memory Cost, 2016,
https://arxiv.org/abs/1604.06174): forward is cut into about as many segments as the root of the
number of its ops. What others read of a segment is kept; the rest is made again when backward first
reads any of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.nodes import copy_of
from remat.graph_capture.prices.keeping_time import Costs

LEAST, MOST = 0.5, 2.0
"""Bounds on the factor of prices: what is beyond says more of the clock than of the ops."""
SEGMENTED = 0.5
"""How far, in proportion, prices go to what ops take in segments. All the way for plans of long
stretches; not at all where each result is made again right before it is read."""


@dataclass(frozen=True)
class Recomputing:
    """A step that computes forward again.

    Attributes
    ----------
    module : called as the joint module. again : names of the ops that run twice.
    """

    module: fx.GraphModule
    again: tuple[str, ...]


def recomputing(joint: Joint) -> Recomputing:
    """The joint step, with what each segment of forward keeps to itself made again in backward."""
    module = copy_of(joint.module)
    nodes = list(module.graph.nodes)
    segments = _segments(joint, nodes)
    later = {node: place for place, node in enumerate(nodes[sum(map(len, segments)) : -1])}
    pinned = {op.name for op in joint.graph.ops if op.pinned}
    again: list[str] = []
    for segment in segments:
        inside = set(segment)
        dropped = [
            node
            for node in segment
            if node.op == "call_function"
            and node.name not in pinned
            and all(user in inside or user in later for user in node.users)
        ]
        again += _make_again(module.graph, dropped, later)
    module.recompile()
    return Recomputing(module, tuple(name for name in again if name in joint.node_of_op))


def as_recomputed(graph: TrainingGraph, costs: Costs, again_us: float, priced_us: float) -> Costs:
    """`costs` with forward between the prices of its ops and what they took in segments.

    Parameters
    ----------
    again_us : what the ops that ran again took. priced_us : what they take by their prices; 0 if
        none ran.
    """
    factor = min(MOST, max(LEAST, again_us / priced_us)) ** SEGMENTED if priced_us else 1.0
    forward = {op.name for op in graph.ops if op.phase == "forward"}
    return {
        name: factor * cost_us if name in forward else cost_us for name, cost_us in costs.items()
    }


def _segments(joint: Joint, nodes: Sequence[fx.Node]) -> list[Sequence[fx.Node]]:
    """All nodes up to the last op of forward, in stretches of as many of its ops."""
    forward = {op.name for op in joint.graph.ops if op.phase == "forward"}
    forward &= joint.node_of_op.keys()
    after = [place + 1 for place, node in enumerate(nodes) if node.name in forward]
    length = max(1, math.isqrt(len(after)))
    ends = dict.fromkeys([0, *after[length - 1 :: length], *after[-1:]])
    return [nodes[begin:end] for begin, end in pairwise(ends)]


def _make_again(
    graph: fx.Graph, dropped: Sequence[fx.Node], later: dict[fx.Node, int]
) -> list[str]:
    """Have nodes of `later` read copies of `dropped`, made where the first does; names of these."""
    readers = {node: [user for user in node.users if user in later] for node in dropped}
    needed = {node for node in dropped if readers[node]}
    if not needed:
        return []
    for node in reversed(dropped):
        if any(user in needed for user in node.users):
            needed.add(node)
    first = min((user for users in readers.values() for user in users), key=later.__getitem__)
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(first):
        for node in dropped:
            if node in needed:
                copies[node] = graph.node_copy(node, lambda source: copies.get(source, source))
    for node, copy in copies.items():
        for user in readers[node]:
            user.replace_input_with(node, copy)
    return [node.name for node in copies]
