"""Random layered graphs: `python -m benchmarks.layered --nodes 500 --seed 1 > file.json`.

The kind of graph on which MOCCASIN is measured, after Gagrani et al. 2022, "Neural
topological ordering for computation graphs", appendix A (https://arxiv.org/abs/2207.05899).
Four such graphs are published with it (https://github.com/haoming-codes/moccasin). The names
of their files give n = 100, 250, 500 and 1000 with w = 0.27, 0.43, 0.36 and 0.31, and nlv = 0.75,
ed = 0.2, scd = 0.14 throughout. What these mean was read off the first graph, RL1. The rules below
give back its 19 inner layers of 2 to 9 nodes, its 194 edges between neighbouring layers and its 33
others. The graphs of 250 and 500 nodes have 22 and 31 inner layers; these rules make 24 and 37.

- width w: mean nodes in a layer over the number of layers;
- layer variability nlv: a layer has (1 ± nlv) times the mean, uniformly;
- edge density ed: between layers of a and b nodes there are max(a, b) edges, so that no node
  is left alone, and ed of all other pairs, which widen a band along the diagonal;
- skip density scd: share of all edges that join layers which are no neighbours.

A source feeds the whole first layer, the whole last layer feeds a sink; both cost nothing.
Costs are uniform in 1..1000; bytes are exponential with mean 3,000, cut to 80..6,200, in
tens: RL1 has 80..6,150 with median 1,600.

The given orders of the published graphs are not layer by layer: they leave a layer before
it is done and come back. In RL1 the next node stands, on average, at 0.72 of those that are
ready: 0 is the longest ready, 1 the newest. A place drawn as √u gives that back. `by_layers` asks
for the order layer by layer instead. With ``--narrow``, graphs of another kind: `narrow.py`; with
``--narrow --table``, what `auto` made of them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from dataclasses import dataclass

import msgspec

from benchmarks.cells.instance_format import Instance, checked, graph_of
from benchmarks.narrow import table
from benchmarks.narrow.drawn import narrow_instance
from benchmarks.narrow.nodes import drawn_nodes
from remat.graph_capture.graph import TrainingGraph

LEAST_NODES = 3
WIDTHS = {100: 0.27, 250: 0.43, 500: 0.36, 1000: 0.31}
"""Widths of the published graphs, by their nodes."""
HASTE = 0.5
"""Power of the uniform draw of a place among the ready nodes."""

Edge = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """The parameters of a random layered graph, with RL1's values.

    Attributes
    ----------
    by_layers : whether the given order is layer by layer.
    """

    nodes: int = 100
    width: float = 0.27
    variability: float = 0.75
    density: float = 0.2
    skips: float = 0.14
    by_layers: bool = False

    def __post_init__(self) -> None:
        if self.nodes < LEAST_NODES:
            raise ValueError(f"nodes must be at least {LEAST_NODES}, found {self.nodes}")
        if self.width <= 0:
            raise ValueError(f"width must be positive, found {self.width}")
        for name in ("variability", "density", "skips"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), found {getattr(self, name)}")


def layered_instance(shape: Shape, seed: int) -> Instance:
    """The graph of that shape and seed, the same in any process."""
    source = random.Random(f"layered {seed}")
    layers = _layers(shape, source)
    edges = _edges(shape, layers, source)
    last = shape.nodes - 1
    nodes = drawn_nodes(shape.nodes, (0, last), source)
    in_layers = tuple(range(shape.nodes))
    name = f"random_layered_n{shape.nodes}_w{shape.width}_nlv{shape.variability}"
    return checked(
        Instance(
            nodes=nodes,
            edges=tuple(sorted(edges)),
            order=_order(shape.nodes, edges, source) if not shape.by_layers else in_layers,
            name=f"{name}_ed{shape.density}_scd{shape.skips}_seed{seed}",
        )
    )


def layered_graph(n: int, seed: int, *, by_layers: bool = False) -> TrainingGraph:
    """A layered graph of `n` nodes like the published ones; see `layered_instance`."""
    return graph_of(layered_instance(Shape(n, published_width(n), by_layers=by_layers), seed))


def published_width(nodes: int) -> float:
    """The width of the published graph that is next in size."""
    return WIDTHS[min(WIDTHS, key=lambda n: abs(n - nodes))]


def _layers(shape: Shape, source: random.Random) -> list[range]:
    """Node ids of each layer, source and sink included; sizes add up to the nodes asked for."""
    inner = shape.nodes - 2
    count = min(inner, max(1, round(math.sqrt(inner / shape.width))))
    low, high = 1 - shape.variability, 1 + shape.variability
    wanted = [source.uniform(low, high) for _ in range(count)]
    spare = inner - count
    ends = [round(spare * sum(wanted[:i]) / sum(wanted)) for i in range(count + 1)]
    sizes = [1, *(1 + b - a for a, b in itertools.pairwise(ends)), 1]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _edges(shape: Shape, layers: list[range], source: random.Random) -> set[Edge]:
    edges: set[Edge] = set()
    for i, (above, below) in enumerate(itertools.pairwise(layers)):
        is_end = i in (0, len(layers) - 2)
        density = 1.0 if is_end else shape.density
        edges |= {(above[a], below[b]) for a, b in _band(len(above), len(below), density, source)}
    count = round(shape.skips / (1 - shape.skips) * len(edges))
    return edges | _skips(layers, count, source)


def _band(a: int, b: int, density: float, source: random.Random) -> set[Edge]:
    """Pairs around the diagonal of a grid of a by b: one for each row and column, then more."""
    most = max(a, b)
    pairs = dict.fromkeys((i * a // most, i * b // most) for i in range(most))
    border: list[Edge] = []
    for i, j in list(pairs):
        _widen(border, pairs, (i, j), a, b)
    wanted = most + round(density * (a * b - most))
    while len(pairs) < wanted:
        k = source.randrange(len(border))
        border[k], border[-1] = border[-1], border[k]
        pair = border.pop()
        if pair not in pairs:
            pairs[pair] = None
            _widen(border, pairs, pair, a, b)
    return set(pairs)


def _widen(border: list[Edge], pairs: dict[Edge, None], pair: Edge, a: int, b: int) -> None:
    """Put the neighbours of `pair` in the grid that are no pairs yet onto the border."""
    x, y = pair
    for i, j in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
        if 0 <= i < a and 0 <= j < b and (i, j) not in pairs:
            border.append((i, j))


def _skips(layers: list[range], count: int, source: random.Random) -> set[Edge]:
    """Edges between random nodes of inner layers that are two or more apart."""
    inner = layers[1:-1]
    layer_of = {node: i for i, layer in enumerate(inner) for node in layer}
    nodes = list(layer_of)
    reachable = sum(
        len(above) * len(below) for i, above in enumerate(inner) for below in inner[i + 2 :]
    )
    found: dict[Edge, None] = {}
    while len(found) < min(count, reachable):
        u, v = sorted(source.sample(nodes, 2))
        if layer_of[v] - layer_of[u] >= 2:
            found[u, v] = None
    return set(found)


def _order(nodes: int, edges: set[Edge], source: random.Random) -> tuple[int, ...]:
    """Nodes as they become ready, newer ones sooner."""
    waits_for = [0] * nodes
    readers: list[list[int]] = [[] for _ in range(nodes)]
    for u, v in sorted(edges):
        waits_for[v] += 1
        readers[u].append(v)
    ready, order = [0], list[int]()
    while ready:
        order.append(ready.pop(int(len(ready) * source.random() ** HASTE)))
        for reader in readers[order[-1]]:
            waits_for[reader] -= 1
            if not waits_for[reader]:
                ready.append(reader)
    return tuple(order)


def main() -> int:
    """Write one instance to standard output, or the table of narrow ones."""
    parser = argparse.ArgumentParser(prog="benchmarks.layered", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=Shape.nodes)
    parser.add_argument("--width", type=float, help="as the published graph next in size has it")
    for name in ("variability", "density", "skips"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Shape, name))
    parser.add_argument("--by-layers", action="store_true", help="the given order, layer by layer")
    parser.add_argument("--narrow", action="store_true", help="of half the root of the nodes")
    parser.add_argument("--table", action="store_true", help="what `auto` made of narrow ones")
    asked = vars(parser.parse_args())
    seed, is_narrow = asked.pop("seed"), asked.pop("narrow")
    if asked.pop("table"):
        if not is_narrow:
            parser.error("--table is of narrow graphs: ask for --narrow --table")
        print("\n".join(table.lines(table.kept())))
        return 0
    if asked["width"] is None:
        asked["width"] = published_width(asked["nodes"])
    try:
        shape = Shape(**asked)
        instance = (
            narrow_instance(shape.nodes, seed) if is_narrow else layered_instance(shape, seed)
        )
    except ValueError as error:
        parser.error(str(error))
    print(msgspec.json.encode(instance).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
