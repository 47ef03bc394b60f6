"""A graph over a range of sizes, of one structure, so that schedules carry over; without torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from msgspec.structs import replace

from remat.graph_capture.devices.known_devices import plan_rounding
from remat.graph_capture.errors import GraphError
from remat.graph_capture.graph import (
    MOST_BYTES,
    Ints,
    TrainingGraph,
    TrainingStep,
    Value,
    are_figures,
)
from remat.graph_capture.sizes.range_costs import (
    NOT_ON_DEVICE,
    CostPoint,
    RangeCosts,
    WorkspacePoint,
    is_within,
)
from remat.graph_capture.sizes.ranged_chunks import Extent, RangedChoice, regions_of
from remat.graph_capture.sizes.symbols import (
    Guard,
    Sizes,
    Symbol,
    bounds_of,
    corner,
    evaluated,
    never_falls,
    require_in_range,
)

if TYPE_CHECKING:
    from networkx import MultiDiGraph


def _check_points(
    n_ops: int, symbols: Sequence[Symbol], points: Sequence[CostPoint],
    workspaces: Sequence[WorkspacePoint],
) -> None:  # fmt: skip
    for one in (*points, *workspaces):
        if set(one.sizes) != {symbol.name for symbol in symbols}:
            raise GraphError(f"a range was measured at {one.sizes}, sizes that it does not have")
        _require_figures(n_ops, one.sizes, one.workspace_bytes, MOST_BYTES)
    for point in points:
        for figures in (point.cost_us, point.flops, [0] * len(point.origins)):
            _require_figures(n_ops, point.sizes, figures, math.inf)
        # Extra bytes may be less than none: a GPU's random state is smaller than the CPU's.
        kept = (*point.extra_bytes.values(), point.libraries_bytes)
        if point.libraries_bytes < 0 or not all(abs(one) < MOST_BYTES for one in kept):
            raise GraphError(f"bytes at {point.sizes} are negative or too large")
    if points and not is_within(corner(symbols, "high"), points[-1].sizes):
        text = f"the ops of a range were timed only up to {points[-1].sizes}"
        raise GraphError(text)


def _require_figures(n_ops: int, sizes: Sizes, figures: Sequence[float], most: float) -> None:
    if len(figures) != n_ops:
        raise GraphError(f"at {sizes} there are figures of {len(figures)} ops, not {n_ops}")
    if not are_figures(*figures) or any(one >= most for one in figures):
        raise GraphError(f"a figure at {sizes} is negative or too large")


_SHOWN = 5  # values that a range's text shows: the largest ones


class RangedGraph(TrainingStep, frozen=True, dict=True, weakref=True):
    """One training step for all sizes of a range.

    Attributes
    ----------
    base : the step at the largest sizes. symbols : the sizes that vary, with their ranges.
    extents : by name, values whose shape or bytes vary. inputs : lines of the signature, with the
        sizes that vary in braces. batch_bytes : of the batch's tensors, each an expression.
    guards : what the trace asks of the sizes; they hold at all sizes of the range.
    points : the sizes at which ops were timed; none for a graph without costs.
    workspaces : further sizes at which workspaces were measured.
    traced_hash : of the graph at the sizes that were traced with, by which it is traced again.
    choices : how heads may run in chunks, as `regions` of the graph of one size say.
    """

    noun: ClassVar[str] = "graph over a range"
    base: TrainingGraph
    symbols: tuple[Symbol, ...]
    extents: dict[str, Extent]
    inputs: tuple[str, ...]
    batch_bytes: tuple[str, ...]
    guards: tuple[Guard, ...] = ()
    points: tuple[CostPoint, ...] = ()
    workspaces: tuple[WorkspacePoint, ...] = ()
    traced_hash: str = ""
    choices: tuple[RangedChoice, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_points(len(self.base.ops), self.symbols, self.points, self.workspaces)

    @property
    def name(self) -> str:
        """The model's class."""
        return self.base.name

    @property
    def top(self) -> TrainingGraph:
        """The graph at the largest sizes."""
        return self.at(**corner(self.symbols, "high"))

    def to_networkx(self) -> MultiDiGraph[str]:
        """That of the largest sizes, as of `TrainingGraph.to_networkx`."""
        return self.top.to_networkx()

    def at(self, **sizes: int) -> TrainingGraph:
        """The graph of the step at these sizes, as a capture at these sizes would be.

        Costs are fitted between the sizes that were timed. Workspaces, and what kernels keep
        beyond their results, are those at the next sizes that were measured, the larger ones, where
        they follow no formula.

        Raises
        ------
        SignatureError : a size is missing, unknown or out of its range.
        """
        point = require_in_range(self.symbols, sizes)
        return self._graph(point, functools.cache(lambda text: evaluated(text, point)))

    def bounding(self, part: Sequence[Symbol]) -> TrainingGraph:
        """The graph at the largest sizes of a part of the range, with bytes that bound the part.

        Batch, values and workspaces take at least what they take at any size of the part. So what
        `simulate` says of a schedule's peak here, no size of the part exceeds. Costs are those of
        the largest sizes.

        Raises
        ------
        SignatureError : the part is not within the range.
        """
        low = require_in_range(self.symbols, corner(part, "low"))
        high = require_in_range(self.symbols, corner(part, "high"))
        if self.rising:  # where no bytes fall as a size grows, they are most at the largest sizes
            most = functools.cache(lambda text: evaluated(text, high))
        else:
            most = functools.cache(lambda text: bounds_of(text, low, high)[1])
        return self._graph(high, most, is_bound=True)

    def _graph(
        self, point: Sizes, bytes_of: Callable[[str], int], *, is_bound: bool = False
    ) -> TrainingGraph:
        shape_of = functools.cache(lambda text: evaluated(text, point))
        counted = plan_rounding(self.base.device)
        graph = replace(
            self.base,
            values=tuple(self._value(value, shape_of, bytes_of) for value in self.base.values),
            inputs=tuple(line.format(**point) for line in self.inputs),
            resident=replace(
                self.base.resident,
                batch_bytes=sum(counted(bytes_of(text)) for text in self.batch_bytes),
            ),
        )
        if not self.points:
            return graph
        made = ((c, c.at(shape_of, bytes_of, counted, is_bound=is_bound)) for c in self.choices)
        costed = self.costs.costed(graph, point, is_bound=is_bound)
        return replace(costed, regions=regions_of(made)) if self.choices else costed

    @functools.cached_property
    def costs(self) -> RangeCosts:
        """The costs of ops at any size, from those at `points`."""
        plain = replace(self, points=())  # costs are made from graphs without any
        graphs, more = (  # they may be out of a range that is a part of the timed one
            [plain._graph(one.sizes, functools.partial(evaluated, sizes=one.sizes)) for one in each]
            for each in (self.points, self.workspaces)
        )
        return RangeCosts(self.points, graphs, self.workspaces, more)

    def _value(
        self, value: Value, shape_of: Callable[[str], int], bytes_of: Callable[[str], int]
    ) -> Value:
        if (extent := self.extents.get(value.name)) is None:
            return value
        return replace(
            value, shape=tuple(map(shape_of, extent.shape)), size_bytes=bytes_of(extent.size_bytes)
        )

    def changed(self, change: Callable[[TrainingGraph], TrainingGraph]) -> RangedGraph:
        """The range of what `change` makes of each size: ops in another order, and more of them,
        which take the same at all sizes; values that are some times as large.

        Raises
        ------
        GraphError : what it makes does not follow from the sizes in this way.
        """
        base, known = change(self.base), self.base.value_by_name
        extents = {
            value.name: _grown(extent, known[value.name].size_bytes, value.size_bytes)
            for value in base.values
            if (extent := self.extents.get(value.name))
        }
        graphs = [change(self.at(**one.sizes)) for one in self.points]
        # What is added may follow from bytes as they are allocated, which a graph with costs has.
        last = graphs[-1].value_by_name if graphs else base.value_by_name
        values = (one if one.name in known else last[one.name] for one in base.values)
        base = replace(base, values=tuple(values))
        made = replace(
            self, base=base, extents=extents,
            points=tuple(map(self._point_of, self.points, graphs)),
            workspaces=tuple(
                replace(one, workspace_bytes=self._placed(one.workspace_bytes, base))
                for one in self.workspaces
            ),
        )  # fmt: skip
        for point, graph in zip(self.points, graphs, strict=True):
            if _bytes_in(made.at(**point.sizes)) != _bytes_in(graph):
                raise GraphError(
                    f"leave out dynamic, and plan for one size: what ranks add to the step of "
                    f"{self.name} does not follow from the sizes"
                )
        return made

    def _point_of(self, point: CostPoint, graph: TrainingGraph) -> CostPoint:
        origins = [op.cost_origin for op in graph.ops] if point.origins else ()
        counted, known = plan_rounding(graph.device), self.base.value_by_name
        # The bytes of a rank's buffers are its wrapper's, which are rounded nowhere.
        sizes = {v.name: v.size_bytes for v in graph.values if v.name not in known}
        added = {name: size - counted(size) for name, size in sizes.items()}
        added = {name: extra for name, extra in added.items() if extra}
        return replace(
            point, extra_bytes=point.extra_bytes | added, origins=tuple(origins),
            cost_us=tuple(op.cost_us for op in graph.ops),
            workspace_bytes=tuple(op.workspace_bytes for op in graph.ops), notes=graph.notes,
            flops=tuple(self._placed(point.flops, graph, is_added=False)),
        )  # fmt: skip

    def _placed(
        self, figures: Sequence[int], graph: TrainingGraph, *, is_added: bool = True
    ) -> tuple[int, ...]:
        """`figures` of this range's ops in the order of `graph`; of others, their workspaces."""
        index = self.base.op_index
        return tuple(
            figures[index[op.name]] if op.name in index else op.workspace_bytes * is_added
            for op in graph.ops
        )

    @functools.cached_property
    def rising(self) -> bool:
        """Whether no value and no batch takes more bytes where a size is smaller, by its form. What
        was measured is taken so that it does not: see `bounding`."""
        return not self.not_rising()

    def not_rising(self) -> tuple[str, ...]:
        """Values whose bytes may fall where a size grows, as far as their form tells."""
        least = corner(self.symbols, "low")
        texts = {name: extent.size_bytes for name, extent in self.extents.items()}
        texts |= {f"batch tensor {i}": text for i, text in enumerate(self.batch_bytes)}
        known = {text: never_falls(text, least) for text in set(texts.values())}
        return tuple(name for name, text in texts.items() if not known[text])

    def size_text(self, name: str) -> str:
        """Bytes of a value in terms of the sizes: ``4·seq·64·4 B``. The last factor is the bytes of
        an element, where the bytes are those of all elements."""
        extent, value = self.extents.get(name), self.base.value_by_name[name]
        if extent is None:
            return f"{value.size_bytes} B"
        point = corner(self.symbols, "high")
        elements = functools.reduce(lambda n, text: n * evaluated(text, point), extent.shape, 1)
        size_bytes = evaluated(extent.size_bytes, point)
        if extent.shape and elements and size_bytes % elements == 0:
            return "·".join([*map(_factor, extent.shape), str(size_bytes // elements)]) + " B"
        return extent.size_bytes.replace("*", "·") + " B"

    def __str__(self) -> str:
        made = [v for v in self.base.values if v.producer and v.name in self.extents]
        largest = sorted(made, key=lambda value: -value.size_bytes)[:_SHOWN]
        lines = [f"  {value.name}: {self.size_text(value.name)}" for value in largest]
        asked = [f"  {guard.text}" for guard in self.guards]
        heads = [repr(self), "largest values:", *lines]
        return "\n".join(heads + (["guards:", *asked] if asked else []))

    def __repr__(self) -> str:
        ranges = ", ".join(map(str, self.symbols))
        return f"RangedGraph({ranges}; at the largest: {self.base!r})"


def _grown(extent: Extent, before_bytes: int, size_bytes: int) -> Extent:
    if size_bytes == before_bytes:
        return extent
    return replace(extent, size_bytes=f"({extent.size_bytes})*{size_bytes // before_bytes}")


def _bytes_in(graph: TrainingGraph) -> tuple[list[int], list[int]]:
    return [one.size_bytes for one in graph.values], [op.workspace_bytes for op in graph.ops]


def _factor(text: str) -> str:
    return f"({text})" if any(sign in text for sign in "+-% ") else text.replace("*", "·")


def structure_of(graph: TrainingGraph) -> tuple[Any, ...]:
    """What two sizes of one step have in common: ops and values, without shapes and costs."""
    ops = [(o.name, o.target, o.phase, o.inputs, o.outputs, o.no_recompute) for o in graph.ops]
    values = [(value.name, value.producer, value.kind, value.dtype) for value in graph.values]
    return ops, values, graph.forward_outputs, graph.outputs


class PartBytes(NamedTuple):
    """Of each value and each op, in the graph's order."""

    values: Ints
    workspaces: Ints
    resident_bytes: int


class BytesOver:
    def __init__(self, graph: RangedGraph) -> None:
        self.graph = graph  # as `RangedGraph.bounding`, without a graph for each of many points
        fixed = {value.name: str(value.size_bytes) for value in graph.base.values}
        varying = {name: extent.size_bytes for name, extent in graph.extents.items()}
        texts = [varying.get(name, text) for name, text in fixed.items()]
        self._texts = list(dict.fromkeys(texts))  # many values have the same text
        place = {text: i for i, text in enumerate(self._texts)}
        self._which = np.array([place[text] for text in texts], dtype=np.int64)
        self._index = {value.name: i for i, value in enumerate(graph.base.values)}
        self._counted = plan_rounding(graph.base.device)
        self._known: dict[tuple[Symbol, ...], PartBytes] = {}

    def of(self, part: Sequence[Symbol]) -> PartBytes:
        key = tuple(part)
        if key not in self._known:
            self._known[key] = self._of(key)
        return self._known[key]

    def _of(self, part: tuple[Symbol, ...]) -> PartBytes:
        graph, high = self.graph, corner(part, "high")
        counted = self._counted if graph.points else int  # sizes as they are, without costs
        distinct = [self._bytes(text, part) for text in self._texts]
        plain = np.array(distinct, dtype=np.int64)[self._which]
        values = np.array(list(map(counted, distinct)), dtype=np.int64)[self._which]
        workspaces = np.array([op.workspace_bytes for op in graph.base.ops], dtype=np.int64)
        libraries_bytes = graph.base.resident.libraries_bytes
        if graph.points:
            workspaces = graph.costs.workspaces_at(high, plain, is_bound=True)
            libraries_bytes = graph.costs.libraries_at(high)
            for name, extra in graph.costs.extra_at(high, plain, is_bound=True).items():
                i = self._index[name]
                values[i] = 0 if extra == NOT_ON_DEVICE else values[i] + extra
        batch_bytes = sum(self._counted(self._bytes(text, part)) for text in graph.batch_bytes)
        resident = replace(
            graph.base.resident, batch_bytes=batch_bytes, libraries_bytes=libraries_bytes
        )
        return PartBytes(values, workspaces, resident.total_bytes)

    def _bytes(self, text: str, part: tuple[Symbol, ...]) -> int:
        high = corner(part, "high")
        if self.graph.rising:
            return evaluated(text, high)
        return bounds_of(text, corner(part, "low"), high)[1]
