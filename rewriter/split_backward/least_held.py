"""Which light ops run with the gradients of inputs, so that the least is held for those of weights.

Ops that the gradients of inputs do not need may run in either part. A cast to half precision, a
mask that is applied, the sum of a bias: run early, what they make is held in place of what they
read. Products and convolutions stay late, since to have them later is what the parts are for.

What is held is a cut between what has run and what is still to run. Each storage is an arc whose
capacity is its bytes; what must run before an op joins it without limit. The least such cut is a
minimum cut (Ford and Fulkerson 1956, https://doi.org/10.4153/CJM-1956-045-5), as in the choice of
what forward saves in torch/_functorch/partitioners.py. Of several the one with the fewest ops early
is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

from ortools.graph.python import max_flow
from torch import fx

from remat.rewriter.split_backward.dependencies import (
    Dependencies,
    Storage,
    is_heavy,
    storages_in_order,
)

SOURCE, SINK = 0, 1


def ops_run_early(
    nodes: Sequence[fx.Node],
    dependencies: Dependencies,
    early: Collection[fx.Node],
    late_results: Collection[fx.Node],
    resident: Collection[Storage],
) -> set[fx.Node]:
    """`early`, and the ops that join them for the least bytes held between the two parts.

    Parameters
    ----------
    nodes : inputs and ops of the graph. early : that run early in any case, inputs among them, with
        all that runs before them.
    late_results : gradients of weights, which are given away late.
    resident : storages that cost nothing to hold.
    """
    flow = cast("Any", max_flow.SimpleMaxFlow())
    place = {node: i for i, node in enumerate(nodes, start=2)}
    held = _Held(nodes, dependencies, late_results)
    sizes = {s: 0 if s in resident else dependencies.bytes_of(s) for s in held.readers}
    unlimited = sum(sizes.values()) + 1
    for node in nodes:
        if node in early:
            flow.add_arc_with_capacity(SOURCE, place[node], unlimited)
        elif is_heavy(node):
            flow.add_arc_with_capacity(place[node], SINK, unlimited)
        for first in dependencies.before[node]:
            flow.add_arc_with_capacity(place[node], place[first], unlimited)
    for i, (storage, readers) in enumerate(held.readers.items(), start=2 + len(nodes)):
        flow.add_arc_with_capacity(place[storage[0]], i, sizes[storage])
        for reader in readers:
            flow.add_arc_with_capacity(i, SINK if reader is None else place[reader], unlimited)
    flow.solve(SOURCE, SINK)
    found = set(cast("list[int]", flow.get_source_side_min_cut()))
    return {node for node in nodes if place[node] in found}


class _Held:
    """By storage, the ops that read or write it; None stands for the end, which takes results."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        dependencies: Dependencies,
        late_results: Collection[fx.Node],
    ) -> None:
        self.readers: dict[Storage, list[fx.Node | None]] = {}
        for node in nodes:
            for storage in storages_in_order(dependencies.touched[node]):
                self.readers.setdefault(storage, []).append(node)
        for result in late_results:
            for storage in storages_in_order(dependencies.storages[result]):
                self.readers.setdefault(storage, []).append(None)
