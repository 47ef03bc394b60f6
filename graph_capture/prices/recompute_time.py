"""What computing again really takes: a step that makes its forward again in segments.

Prices of single ops know nothing of where ops stand in a step. So one step that recomputes is run,
that of Chen et al. (Training Deep Nets with Sublinear Memory Cost, 2016,
https://arxiv.org/abs/1604.06174). Forward is cut into about as many segments as the root of the
number of its ops. What others read of a segment is kept. The rest is made again when backward first
reads any of it.

Plans lie between two kinds. Where each result is made again right before it is read, all of what
keeping takes is saved (`keeping_time.py`). Where a stretch is made again and held, as plans of
chains do, nothing is saved, and more is paid for reading what lies far away. So forward's prices
are multiplied by the root of what the segments took over what they should take by their prices:
halfway, in proportion, between the two kinds.

On an AMD EPYC the segments took 1.12 times their price in an LSTM, 0.99 in a mixture of experts,
1.08 in GPT-2, 1.13 in a U-Net, 1.07 in a ViT and 1.14 in ResNet-50. Over 33 plans of these models
and a Llama, each timed in 42 rounds and priced three times, planned overheads were off by these
points:

    kept is cheaper by   prices times            median   worst
    nothing              1                        0.57     2.5
    nothing              the factor               0.57     2.1
    half of keeping      1                        0.57     2.3
    half                 the root of the factor   0.37     1.9
    all                  1                        0.57     2.5
    all                  the root (taken)         0.38     1.6
    all                  the factor               0.39     1.6

Segments that a solver cuts (`chen_sqrt`) gave like factors. They are not taken, since this package
knows no solver. The run has its price: with it, and rounds for twice as long, capture and pricing
of the U-Net take 9.1 s in place of 5.3, of the LSTM 9.4 in place of 4.9. Rounds that end once the
ratio is sure were not tried.
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
"""Bounds on the factor of prices. What is beyond says more of the clock than of the ops."""
SEGMENTED = 0.5
"""The power of the factor that prices are multiplied by: 1 would be right for plans of long
stretches, 0 where each result is made again right before it is read."""


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
    """The joint step, in which what only a segment itself reads of it is made again in backward."""
    again: list[str] = []
    module = copy_of(joint.module, lambda graph: again.extend(_in_segments(joint, graph)))
    return Recomputing(module, tuple(name for name in again if name in joint.node_of_op))


def _in_segments(joint: Joint, graph: fx.Graph) -> list[str]:
    """Let a copy of the joint graph compute forward again; the names of what it runs again."""
    nodes = list(graph.nodes)
    segments = _segments(joint, nodes)
    later = {node: place for place, node in enumerate(nodes[sum(map(len, segments)) : -1])}
    pinned = {op.name for op in joint.graph.ops if op.pinned}
    again: list[str] = []
    for segment in segments:
        inside = set(segment)
        # What another segment reads is kept, or making one again would make those before it again.
        dropped = [
            node
            for node in segment
            if node.op == "call_function"
            and node.name not in pinned
            and all(user in inside or user in later for user in node.users)
        ]
        again += _make_again(graph, dropped, later)
    return again


def as_recomputed(graph: TrainingGraph, costs: Costs, again_us: float, priced_us: float) -> Costs:
    """`costs` with forward between the prices of its ops and what they took in segments.

    Parameters
    ----------
    again_us : what the ops that ran again took. priced_us : what they take by their prices; 0
        if none ran.
    """
    factor = min(MOST, max(LEAST, again_us / priced_us)) ** SEGMENTED if priced_us else 1.0
    forward = {op.name for op in graph.ops if op.phase == "forward"}
    return {
        name: factor * cost_us if name in forward else cost_us for name, cost_us in costs.items()
    }


def _segments(joint: Joint, nodes: Sequence[fx.Node]) -> list[Sequence[fx.Node]]:
    """All nodes up to the last op of forward, in stretches of equally many ops."""
    forward = {op.name for op in joint.graph.ops if op.phase == "forward"}
    forward &= joint.node_of_op.keys()
    after = [place + 1 for place, node in enumerate(nodes) if node.name in forward]
    length = max(1, math.isqrt(len(after)))
    ends = dict.fromkeys([0, *after[length - 1 :: length], *after[-1:]])
    return [nodes[begin:end] for begin, end in pairwise(ends)]


def _make_again(
    graph: fx.Graph, dropped: Sequence[fx.Node], later: dict[fx.Node, int]
) -> list[str]:
    """Let nodes of `later` read copies of `dropped`; returns the names of those that are copied.

    The copies stand before the first node that reads one.
    """
    readers = {node: [user for user in node.users if user in later] for node in dropped}
    needed = {node for node in dropped if readers[node]}
    if not needed:
        return []
    # Backwards, as what a needed node reads inside the segment is needed too.
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
