"""Narrow layered graphs: another kind than the published one, on which no solver was tuned.

A layer has half the root of n nodes, as wide as deep networks with a few branches are. A node reads
one to three results, two of three of them out of the layer above, the rest out of one of the eight
layers above. So some results live long. Some are never read. The given order is that in which the
nodes are made, layer by layer. Costs and bytes are those of `drawn_nodes.py`.
"""

from __future__ import annotations

import math
import random

from benchmarks.cells.instance_format import Instance, checked, graph_of
from benchmarks.narrow.nodes import drawn_nodes
from remat.graph_capture.graph import TrainingGraph

MOST_READ = 3
FAR_PART, REACH = 1 / 3, 8
"""The part of reads that reach further than the layer above, and how many layers."""
LEAST_NODES = 3
Edge = tuple[int, int]


def narrow_instance(nodes: int, seed: int) -> Instance:
    """The graph of so many nodes and that seed, the same in any process.

    Raises
    ------
    ValueError : fewer than three nodes.
    """
    if nodes < LEAST_NODES:
        raise ValueError(f"nodes must be at least {LEAST_NODES}, found {nodes}")
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
        for node in layers[at]:
            for _ in range(source.randint(1, MOST_READ)):
                back = 1 if source.random() > FAR_PART else source.randint(1, min(REACH, at))
                edges.add((source.choice(layers[at - back]), node))
    return edges
