"""Prices of ops at any size of a range, from those at a few sizes.

The cost of an op is taken as ``a + b * flops + c * bytes``, with coefficients of 0 or more that fit
what was measured best, relative to it: the form of the roofline model (Williams, Waterman and
Patterson 2009, https://doi.org/10.1145/1498765.1498785), with the two ceilings added up. What is
left over at the sizes that were measured is interpolated between them, so that these keep the
prices that they were measured to have.

Workspaces are told in `workspaces.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from remat.graph_capture.devices.device_table import counted_on
from remat.graph_capture.graph import Origin, TrainingGraph
from remat.graph_capture.shapes.ranges import Sizes
from remat.graph_capture.shapes.workspaces import WorkspacePoint, Workspaces, is_within
from remat.graph_capture.shapes.workspaces_of_range import WorkspacesOfRange

Floats = NDArray[np.float64]
NOT_ON_DEVICE = -1


class PricePoint(msgspec.Struct, frozen=True):
    """What was measured at one size.

    Attributes
    ----------
    sizes : by symbol. cost_us, workspace_bytes, flops : of each op, in the graph's order.
    extra_bytes : by value, what its op keeps beyond what the shapes say; `NOT_ON_DEVICE` for what
        takes nothing on the device.
    libraries_bytes : see `Resident`. prices, origins, notes, versions : as of the priced graph.
    """

    sizes: dict[str, int]
    cost_us: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    flops: tuple[int, ...]
    extra_bytes: dict[str, int] = {}
    libraries_bytes: int = 0
    prices: str = "measured"
    origins: tuple[Origin, ...] = ()
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = {}


class PricesOfRange:
    """Prices between points, which go from the smallest sizes to the largest.

    Parameters
    ----------
    graphs : the unpriced graph at each point.
    more : further sizes of which workspaces are known. more_graphs : the unpriced graph at each.
    """

    def __init__(
        self,
        points: Sequence[PricePoint],
        graphs: Sequence[TrainingGraph],
        more: Sequence[WorkspacePoint] = (),
        more_graphs: Sequence[TrainingGraph] = (),
    ) -> None:
        self.points = points
        self._costs = np.array([one.cost_us for one in points])
        self._flops = np.array([one.flops for one in points], dtype=np.float64)
        self._moved = np.array([_moved_bytes(graph) for graph in graphs])
        self._workspaces = WorkspacesOfRange(
            [WorkspacePoint(one.sizes, one.workspace_bytes) for one in points], graphs,
            more, more_graphs,
        )  # fmt: skip
        extra = {(name, more) for one in points for name, more in one.extra_bytes.items()}
        self._off_device = {name: more for name, more in extra if more == NOT_ON_DEVICE}
        self._with_extra = sorted({name for name, _ in extra} - self._off_device.keys())
        self._kept = Workspaces(
            [one.sizes for one in points],
            [[one.extra_bytes.get(name, 0) for name in self._with_extra] for one in points],
            graphs,
            beside=_made_with(graphs[0], self._with_extra),
        )
        self._works = np.log(np.maximum(self._moved.sum(axis=1), 1.0))
        self._form = _fitted(self._costs, self._flops, self._moved)
        fitted = self._by_form(self._flops, self._moved)
        self._left = np.divide(self._costs, fitted, out=np.ones_like(fitted), where=fitted > 0)

    @property
    def error_at_middle(self) -> float:
        """How far the sum of fitted costs is from the measured one at the middle, as a fraction."""
        middle = len(self.points) // 2
        fitted = self._by_form(self._flops, self._moved)[middle].sum()
        measured = self._costs[middle].sum()
        return float(abs(fitted - measured) / measured) if measured else 0.0

    def priced(
        self, graph: TrainingGraph, sizes: Sizes, *, is_bound: bool = False
    ) -> TrainingGraph:
        """An unpriced graph of the range with its prices.

        Parameters
        ----------
        is_bound : whether workspaces are to bound those of all smaller sizes too.
        """
        moved = _moved_bytes(graph)
        work = float(np.log(max(moved.sum(), 1.0)))
        flops = np.exp(_between(work, self._works, np.log(np.maximum(self._flops, 1e-9))))
        left = _between(work, self._works, self._left)
        costs = self._by_form(flops[None], moved[None])[0] * left
        last = self.points[self._upper(sizes)]
        plain = np.array([value.size_bytes for value in graph.values], dtype=np.int64)
        workspaces = self.workspaces_at(sizes, plain, is_bound=is_bound)
        ops = tuple(
            msgspec.structs.replace(op, cost_us=float(c), workspace_bytes=int(w), price=origin)
            for op, c, w, origin in zip(graph.ops, costs, workspaces, last.origins, strict=True)
        )
        extra = self.extra_at(sizes, plain, is_bound=is_bound)
        allocated = counted_on(graph.device)
        values = tuple(
            msgspec.structs.replace(
                v, size_bytes=bytes_kept(allocated(v.size_bytes), extra, v.name)
            )
            for v in graph.values
        )
        libraries_bytes = self.libraries_at(sizes)
        resident = msgspec.structs.replace(graph.resident, libraries_bytes=libraries_bytes)
        return msgspec.structs.replace(
            graph, ops=ops, values=values, resident=resident, prices=last.prices,
            notes=last.notes, versions=last.versions,
        )  # fmt: skip

    def workspaces_at(
        self, sizes: Sizes, value_bytes: NDArray[np.int64], *, is_bound: bool
    ) -> NDArray[np.int64]:
        """Workspace of each op; see `Workspaces.at`."""
        return self._workspaces.at(sizes, value_bytes, is_bound=is_bound)

    def libraries_at(self, sizes: Sizes) -> int:
        """What libraries hold: the most that was measured up to the next larger point."""
        return max(one.libraries_bytes for one in self.points[: self._upper(sizes) + 1])

    def extra_at(
        self, sizes: Sizes, value_bytes: NDArray[np.int64], *, is_bound: bool
    ) -> dict[str, int]:
        """What values take beyond what their shapes say; found as workspaces are."""
        found = self._kept.at(sizes, value_bytes, is_bound=is_bound).tolist()
        named = zip(self._with_extra, found, strict=True)
        return {name: extra for name, extra in named if extra} | self._off_device

    def _upper(self, sizes: Sizes) -> int:
        return next(i for i, one in enumerate(self.points) if is_within(sizes, one.sizes))

    def _by_form(self, flops: Floats, moved: Floats) -> Floats:
        a, b, c = self._form
        return a + b * flops + c * moved


def bytes_kept(size_bytes: int, extra: Mapping[str, int], name: str) -> int:
    """What a value takes of whose bytes a kernel keeps `extra` more, or none on the device."""
    more = extra.get(name, 0)
    return 0 if more == NOT_ON_DEVICE else size_bytes + more


def point_of(
    sizes: Sizes, plain: TrainingGraph, priced: TrainingGraph, flops: Sequence[int]
) -> PricePoint:
    """What `priced` says of the step that `plain` has without prices."""
    allocated = counted_on(plain.device)
    extra: dict[str, int] = {}
    for before, after in zip(plain.values, priced.values, strict=True):
        more = after.size_bytes - allocated(before.size_bytes)
        if more:
            extra[before.name] = more if after.size_bytes else NOT_ON_DEVICE
    return PricePoint(
        sizes=dict(sizes),
        cost_us=tuple(op.cost_us for op in priced.ops),
        workspace_bytes=tuple(op.workspace_bytes for op in priced.ops),
        flops=tuple(flops),
        extra_bytes=extra,
        libraries_bytes=priced.resident.libraries_bytes,
        prices=priced.prices,
        origins=tuple(op.price for op in priced.ops),
        notes=priced.notes,
        versions=priced.versions,
    )


def _made_with(graph: TrainingGraph, names: Sequence[str]) -> list[tuple[str, ...]]:
    """For each value, what its op reads and makes; nothing for what is resident."""
    makers = {name: (*op.inputs, *op.outputs) for op in graph.ops for name in op.outputs}
    return [makers.get(name, ()) for name in names]


def _between(at: float, known: Floats, rows: Floats) -> Floats:
    """Each column of `rows`, one a point, interpolated; constant beyond the ends."""
    if at <= known[0] or len(known) == 1:
        return rows[0]
    for i in range(1, len(known)):
        if at <= known[i]:
            part = (at - known[i - 1]) / max(known[i] - known[i - 1], 1e-12)
            return rows[i - 1] + part * (rows[i] - rows[i - 1])
    return rows[-1]


def _moved_bytes(graph: TrainingGraph) -> Floats:
    """Bytes of what each op reads and makes; of one that reads and makes nothing, of all ops."""
    size = {value.name: value.size_bytes for value in graph.values}
    moved = np.array(
        [float(sum(size[name] for name in (*op.inputs, *op.outputs))) for op in graph.ops]
    )
    # What the whole step takes beyond its ops is booked on the arrival of the tangents.
    is_whole = np.array([op.target == "remat.tangents" for op in graph.ops])
    return np.where(is_whole, moved.sum(), moved)


def _fitted(costs: Floats, flops: Floats, moved: Floats) -> tuple[Floats, Floats, Floats]:
    """Coefficients of each op, 0 or more: the best of those with some of them 0."""
    columns = np.stack([np.ones_like(costs), flops, moved], axis=-1)  # points, ops, 3
    scale = np.maximum(columns.max(axis=0), 1e-300)
    weight = 1.0 / np.maximum(costs, 1e-9)
    table = np.swapaxes(columns / scale * weight[..., None], 0, 1)  # ops, points, 3
    wanted = np.swapaxes(costs * weight, 0, 1)[..., None]
    best = np.zeros((costs.shape[1], 3))
    least = np.full(costs.shape[1], np.inf)
    for used in _choices():
        found: Any = np.linalg.pinv(table[..., used]) @ wanted
        error = ((table[..., used] @ found - wanted) ** 2).sum(axis=(1, 2))
        error[(found < 0).any(axis=(1, 2))] = np.inf
        is_better = error < least * (1 - 1e-9)
        least = np.where(is_better, error, least)
        own = np.zeros((costs.shape[1], 3))
        own[:, used] = found[..., 0]
        best = np.where(is_better[:, None], own, best)
    a, b, c = (best / scale).T
    return a, b, c


def _choices() -> list[list[int]]:
    """Which coefficients are not 0. All three would fit three points whatever they are."""
    return [list(one) for n in (1, 2) for one in itertools.combinations(range(3), n)]
