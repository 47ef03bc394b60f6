"""Narrow layered graphs: another kind than the published one, on which no solver was tuned.

A layer has half the root of n nodes, as wide as deep networks with a few branches are. A node reads
one to three results out of the four layers above, so that many live long. The given order is that
in which the nodes are made, layer by layer. A result that nobody has read is read by a node of the
layers below, so only the last layer feeds the sink. Costs and bytes are those of `drawn_nodes.py`.
"""

from __future__ import annotations

import math
import random

from benchmarks.drawn_nodes import drawn_nodes
from benchmarks.instance_format import Instance, checked, graph_of
from remat.graph_capture.graph import TrainingGraph

REACH = 4
"""Layers above that a node reads from."""
MOST_READ = 3
Edge = tuple[int, int]


def narrow_instance(nodes: int, seed: int) -> Instance:
    """The graph of so many nodes and that seed, the same in any process.

    Raises
    ------
    ValueError : fewer than three nodes.
    """
    if nodes < MOST_READ:
        raise ValueError(f"nodes must be at least {MOST_READ}, found {nodes}")
    source = random.Random(f"narrow {seed}")
    width = max(1, round(math.sqrt(nodes) / 2))
    inner, sink = range(nodes - 1), nodes - 1
    layers = [inner[i : i + width] for i in range(0, nodes - 1, width)]
    edges = _edges(layers, source) | {(node, sink) for node in layers[-1]}
    return checked(
        Instance(
            nodes=drawn_nodes(nodes, (sink,), source),
            edges=tuple(sorted(edges)),
            order=tuple(range(nodes)),
            name=f"random_narrow_n{nodes}_reach{REACH}_seed{seed}",
        )
    )


def narrow_graph(nodes: int, seed: int) -> TrainingGraph:
    """`narrow_instance` as a graph."""
    return graph_of(narrow_instance(nodes, seed))


def _edges(layers: list[range], source: random.Random) -> set[Edge]:
    edges: set[Edge] = set()
    for at in range(1, len(layers)):
        above = [node for layer in layers[max(at - REACH, 0) : at] for node in layer]
        for node in layers[at]:
            count = min(source.randint(1, MOST_READ), len(above))
            edges |= {(read, node) for read in source.sample(above, count)}
    read = {producer for producer, _ in edges}
    for at, layer in enumerate(layers[:-1]):
        below = [node for other in layers[at + 1 : at + 1 + REACH] for node in other]
        edges |= {(node, source.choice(below)) for node in layer if node not in read}
    return edges
