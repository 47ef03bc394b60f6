"""Costs and bytes of random graphs, as in the published layered ones: see `layered.py`."""

from __future__ import annotations

import math
import random
from collections.abc import Container

from benchmarks.cells.instance_format import Node

MOST_COST = 1000
MEAN_BYTES, LEAST_BYTES, MOST_BYTES, STEP_BYTES = 3000, 80, 6200, 10


def drawn_nodes(count: int, ends: Container[int], source: random.Random) -> tuple[Node, ...]:
    """So many nodes, of which `ends` cost nothing."""
    return tuple(
        Node(i, 0 if i in ends else source.randint(1, MOST_COST), _bytes(source), str(i))
        for i in range(count)
    )


def _bytes(source: random.Random) -> int:
    drawn = math.inf
    while drawn > MOST_BYTES:
        drawn = source.expovariate(1 / MEAN_BYTES)
    return max(LEAST_BYTES, STEP_BYTES * round(drawn / STEP_BYTES))
