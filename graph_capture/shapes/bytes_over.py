"""Bytes of all values and workspaces at any sizes of a range, as arrays.

They are those of `RangedGraph.bounding`, without a graph being made. Searches over sizes ask for
them at hundreds of points; what they find is judged on graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from remat.graph_capture.devices.device_table import counted_on
from remat.graph_capture.shapes.expressions import evaluated
from remat.graph_capture.shapes.intervals import bounds_of
from remat.graph_capture.shapes.price_points import NOT_ON_DEVICE
from remat.graph_capture.shapes.ranged_graph import RangedGraph
from remat.graph_capture.shapes.ranges import Symbol, corner

Ints = NDArray[np.int64]


class PartBytes(NamedTuple):
    """`values` : of each value in the graph's order. `workspaces` : of each op."""

    values: Ints
    workspaces: Ints
    resident_bytes: int


class BytesOver:
    """Bytes of one graph over a range, for any part of it."""

    def __init__(self, graph: RangedGraph) -> None:
        self.graph = graph
        named = [graph.extents.get(value.name) for value in graph.base.values]
        texts = [
            str(value.size_bytes) if extent is None else extent.size_bytes
            for value, extent in zip(graph.base.values, named, strict=True)
        ]
        self._texts = list(dict.fromkeys(texts))
        place = {text: i for i, text in enumerate(self._texts)}
        self._which = np.array([place[text] for text in texts], dtype=np.int64)
        self._index = {value.name: i for i, value in enumerate(graph.base.values)}
        self._counted = counted_on(graph.base.device)
        self._known: dict[tuple[Symbol, ...], PartBytes] = {}

    def of(self, part: Sequence[Symbol]) -> PartBytes:
        """What bounds the bytes at all sizes of a part."""
        key = tuple(part)
        if key not in self._known:
            self._known[key] = self._of(key)
        return self._known[key]

    def _of(self, part: tuple[Symbol, ...]) -> PartBytes:
        graph, high = self.graph, corner(part, "high")
        # Of a graph that no price was taken of, sizes are as they are: see `RangedGraph.at`.
        counted = self._counted if graph.points else int
        distinct = [self._bytes(text, part) for text in self._texts]
        plain = np.array(distinct, dtype=np.int64)[self._which]
        values = np.array(list(map(counted, distinct)), dtype=np.int64)[self._which]
        workspaces = np.array([op.workspace_bytes for op in graph.base.ops], dtype=np.int64)
        libraries_bytes = graph.base.resident.libraries_bytes
        if graph.points:
            workspaces = graph.prices.workspaces_at(high, plain, is_bound=True)
            libraries_bytes = graph.prices.libraries_at(high)
            for name, extra in graph.prices.extra_at(high, plain, is_bound=True).items():
                i = self._index[name]
                values[i] = 0 if extra == NOT_ON_DEVICE else values[i] + extra
        batch_bytes = sum(self._counted(self._bytes(text, part)) for text in graph.batch_bytes)
        resident = msgspec.structs.replace(
            graph.base.resident, batch_bytes=batch_bytes, libraries_bytes=libraries_bytes
        )
        return PartBytes(values, workspaces, resident.total_bytes)

    def _bytes(self, text: str, part: tuple[Symbol, ...]) -> int:
        high = corner(part, "high")
        if self.graph.rising:
            return evaluated(text, high)
        return bounds_of(text, corner(part, "low"), high)[1]
