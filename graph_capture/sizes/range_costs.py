"""Costs of ops at any size of a range, from those at a few sizes.

A cost is ``a + b * flops + c * bytes``, with coefficients of 0 or more that fit best: the model of
`roofline` with its ceilings added up. What is left over is interpolated.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from remat.graph_capture.devices.known_devices import plan_rounding
from remat.graph_capture.graph import TANGENTS, Floats, Ints, Origin, TrainingGraph, Value
from remat.graph_capture.sizes.symbols import Sizes

# A workspace may follow no formula: then it is the larger of those at the measured sizes next to
# it. Where three sizes in a row are, to the byte, a constant and a share of a tensor that the op
# reads or makes, that holds between them.

_ON_LINE = 3  # points in a row that make a line: any two are on one
_NONE_YET = np.iinfo(np.int64).min
_SLACK = 1e-6  # of a byte: what floats may be off


class WorkspacePoint(msgspec.Struct, frozen=True):
    sizes: dict[str, int]
    workspace_bytes: tuple[int, ...]


class _Line(NamedTuple):
    """Holds up to the point `last`, from the point before `first` on."""

    op: int
    value: int
    size: int  # bytes of the value
    made: int  # workspace at `size`
    step: int
    more: int  # for each further `step` bytes
    first: int
    last: int


class Workspaces:
    """Workspaces between points, which go from the smallest sizes to the largest. `beside`: the
    values with which each may grow; left out, what the op reads or makes. `along`: the only size
    that varies, in which lines then are; else they are in bytes of values."""

    def __init__(
        self, sizes: Sequence[Sizes], measured: Sequence[Sequence[int]],
        graphs: Sequence[TrainingGraph], along: str = "",
        beside: Sequence[Sequence[str]] | None = None,
    ) -> None:  # fmt: skip
        self._sizes, self._along = sizes, along
        self._measured: Ints = np.array(measured, dtype=np.int64)
        self._most: Ints = np.maximum.accumulate(self._measured, axis=0)  # bounds all smaller sizes
        lines = [] if along else _lines(self._measured, graphs, beside)
        for i in self.varying().tolist() if along else ():
            at = [one[along] for one in sizes]
            lines += _lines_of(i, 0, at, self._measured[:, i].tolist())
        self._lines: Ints = np.array(lines, dtype=np.int64).reshape(-1, len(_Line._fields))

    def at(self, sizes: Sizes, value_bytes: Ints, *, is_bound: bool) -> Ints:
        """Of each op; `is_bound`: no less than at any smaller size. `value_bytes`: by shape."""
        if self._along:
            # All others were at their largest where this one was measured.
            sizes = {**self._sizes[-1], self._along: sizes[self._along]}
            value_bytes = np.array([sizes[self._along]], dtype=np.int64)
        upper = next(i for i, one in enumerate(self._sizes) if is_within(sizes, one))
        lines = self._lines[(self._lines[:, -2] <= upper) & (upper <= self._lines[:, -1])].T
        found = self._beside(upper, sizes, is_bound)
        op, value, size, made, step, more = lines[:-2]
        # A line rises, so that all that is below it was measured before its point.
        found[op] = self._most[upper - 1][op] if is_bound and upper else _NONE_YET
        beyond = (value_bytes[value] - size) * (more / np.maximum(step, 1))
        np.maximum.at(found, op, made + np.ceil(beyond - _SLACK).astype(np.int64))
        return found

    def varying(self) -> Ints:
        return np.flatnonzero((self._measured != self._measured[0]).any(axis=0))

    def _beside(self, upper: int, sizes: Sizes, is_bound: bool) -> Ints:
        """What was measured at these sizes, or next to them."""
        if is_bound or (len(sizes) > 1 and not self._along):
            return self._most[upper].copy()
        if not upper or dict(sizes) == dict(self._sizes[upper]):
            return self._measured[upper].copy()
        # A kernel may choose by the size, so the larger of both neighbours counts.
        return np.maximum(self._measured[upper - 1], self._measured[upper])


def is_within(sizes: Sizes, upper: Sizes) -> bool:
    return all(size <= upper[name] for name, size in sizes.items())


def off_lines(graphs: Sequence[TrainingGraph], measured: Sequence[Sequence[int]]) -> list[str]:
    """Ops that may have a workspace without a formula: those off a line, and all of their kind."""
    made: Ints = np.array(measured, dtype=np.int64)
    # One line has to go through all points.
    on_line = {line.op for line in _lines(made, graphs) if line.last - line.first + 2 == len(made)}
    ops = graphs[0].ops
    varying = [i for i in range(len(ops)) if made[:, i].any() and i not in on_line]
    targets = {ops[i].target for i in varying}
    return [op.name for op in ops if op.target in targets]


def _lines(
    measured: Ints, graphs: Sequence[TrainingGraph], beside: Sequence[Sequence[str]] | None = None
) -> list[_Line]:
    if len(graphs) < _ON_LINE:
        return []
    index = {value.name: i for i, value in enumerate(graphs[0].values)}
    sizes = np.array([[value.size_bytes for value in graph.values] for graph in graphs])
    found: list[_Line] = []
    own = [(*op.inputs, *op.outputs) for op in graphs[0].ops] if beside is None else beside
    for i, names in enumerate(own):
        if (measured[:, i] == measured[0, i]).all():
            continue
        for v in dict.fromkeys(index[name] for name in names):
            found += _lines_of(i, v, sizes[:, v].tolist(), measured[:, i].tolist())
    return found


def _lines_of(op: int, value: int, sizes: list[int], made: list[int]) -> list[_Line]:
    """The rising lines on which three or more points in a row are, each as far as it goes."""
    found: list[_Line] = []
    start = 0
    while start + _ON_LINE <= len(sizes):
        step, more = sizes[start + 1] - sizes[start], made[start + 1] - made[start]
        end = start + 1
        while end + 1 < len(sizes) and _goes_on(sizes, made, start, end + 1, step, more):
            end += 1
        if end - start + 1 >= _ON_LINE and step > 0 and more > 0:
            found.append(_Line(op, value, sizes[start], made[start], step, more, start + 1, end))
        start = end  # the next line may begin where this one ends
    return found


def _goes_on(sizes: list[int], made: list[int], start: int, at: int, step: int, more: int) -> bool:
    rises = sizes[at] > sizes[at - 1]
    # In whole numbers, so that it holds to the byte.
    return rises and (made[at] - made[start]) * step == (sizes[at] - sizes[start]) * more


class WorkspacesOfRange:
    """Workspaces between the points of a range, in which one or several sizes vary."""

    def __init__(
        self, points: Sequence[WorkspacePoint], graphs: Sequence[TrainingGraph],
        more: Sequence[WorkspacePoint], more_graphs: Sequence[TrainingGraph],
    ) -> None:  # fmt: skip
        names = list(points[0].sizes)
        if len(names) == 1:
            self._diagonal = _in_a_row([*points, *more], [*graphs, *more_graphs])
            self._along: dict[str, tuple[Workspaces, Ints]] = {}
            return
        self._diagonal = _in_a_row(points, graphs)  # smallest to largest; others vary one size
        along = dict[str, Workspaces]()
        for name in names:
            # The points that differ from the last one in one size alone, and it.
            others = {other: size for other, size in points[-1].sizes.items() if other != name}
            every = [*more, points[-1]]
            row = [one for one in every if others.items() <= one.sizes.items()]
            if len(row) > 1:
                along[name] = _in_a_row(row, [graphs[-1]] * len(row), name)
        # What varies with one size follows from it: attention's buffers hang on no batch.
        axes = Counter(i for one in along.values() for i in one.varying().tolist())
        self._along = {
            name: (one, np.array([i for i in one.varying() if axes[int(i)] == 1], dtype=np.int64))
            for name, one in along.items()
        }

    def at(self, sizes: Sizes, value_bytes: Ints, *, is_bound: bool) -> Ints:
        found = self._diagonal.at(sizes, value_bytes, is_bound=is_bound)
        for one, ops in self._along.values():
            own = one.at(sizes, value_bytes, is_bound=is_bound)[ops]
            # No less than what was measured at the timed points up to these sizes.
            found[ops] = np.maximum(own, found[ops]) if is_bound else own
        return found


def _in_a_row(
    points: Sequence[WorkspacePoint], graphs: Sequence[TrainingGraph], along: str = ""
) -> Workspaces:
    pairs = sorted(zip(points, graphs, strict=True), key=lambda pair: tuple(pair[0].sizes.values()))
    measured = [one.workspace_bytes for one, _ in pairs]
    return Workspaces([one.sizes for one, _ in pairs], measured, [g for _, g in pairs], along)


NOT_ON_DEVICE = -1


class CostPoint(msgspec.Struct, frozen=True):
    """What was measured at one size; of each op, in the graph's order."""

    sizes: dict[str, int]
    cost_us: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    flops: tuple[int, ...]
    extra_bytes: dict[str, int] = {}  # what ops keep beyond shapes; `NOT_ON_DEVICE`: nothing
    libraries_bytes: int = 0
    cost_origin: str = msgspec.field(default="measured", name="prices")  # the key in files
    origins: tuple[Origin, ...] = ()
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = {}


class RangeCosts:
    """Costs between points, which go from the smallest sizes to the largest."""

    def __init__(
        self, points: Sequence[CostPoint], graphs: Sequence[TrainingGraph],
        more: Sequence[WorkspacePoint] = (), more_graphs: Sequence[TrainingGraph] = (),
    ) -> None:  # fmt: skip
        self.points = points
        self._costs = np.array([one.cost_us for one in points])
        self._flops = np.array([one.flops for one in points], dtype=np.float64)
        self._moved = np.array([_moved_bytes(graph) for graph in graphs])
        self._workspaces = WorkspacesOfRange(
            [WorkspacePoint(one.sizes, one.workspace_bytes) for one in points], graphs,
            more, more_graphs,
        )  # fmt: skip
        extra = {pair for one in points for pair in one.extra_bytes.items()}
        self._off_device = {name: kept for name, kept in extra if kept == NOT_ON_DEVICE}
        self._with_extra = sorted({name for name, _ in extra} - self._off_device.keys())
        makers = {name: (*op.inputs, *op.outputs) for op in graphs[0].ops for name in op.outputs}
        self._kept = Workspaces(
            [one.sizes for one in points],
            [[one.extra_bytes.get(name, 0) for name in self._with_extra] for one in points],
            graphs,
            beside=[makers.get(name, ()) for name in self._with_extra],
        )
        self._works = np.log(np.maximum(self._moved.sum(axis=1), 1.0))
        self._form = _fitted(self._costs, self._flops, self._moved)
        fitted = self._by_form(self._flops, self._moved)
        # Interpolated beside the form, so that the measured sizes keep their measured costs.
        self._left = np.divide(self._costs, fitted, out=np.ones_like(fitted), where=fitted > 0)

    @property
    def error_at_middle(self) -> float:
        """How far the sum of fitted costs is from the measured one at the middle, as a fraction."""
        middle = len(self.points) // 2
        fitted = self._by_form(self._flops, self._moved)[middle].sum()
        measured = self._costs[middle].sum()
        return float(abs(fitted - measured) / measured) if measured else 0.0

    def costed(
        self, graph: TrainingGraph, sizes: Sizes, *, is_bound: bool = False
    ) -> TrainingGraph:
        """With its costs; `is_bound`: with workspaces that bound those of all smaller sizes too."""
        moved = _moved_bytes(graph)
        work = float(np.log(max(moved.sum(), 1.0)))
        flops = np.exp(_between(work, self._works, np.log(np.maximum(self._flops, 1e-9))))
        costs = self._by_form(flops[None], moved[None])[0] * _between(work, self._works, self._left)
        last = self.points[self._upper(sizes)]
        plain = np.array([value.size_bytes for value in graph.values], dtype=np.int64)
        workspaces = self.workspaces_at(sizes, plain, is_bound=is_bound)
        ops = tuple(
            replace(op, cost_us=float(c), workspace_bytes=int(w), cost_origin=origin)
            for op, c, w, origin in zip(graph.ops, costs, workspaces, last.origins, strict=True)
        )
        extra = self.extra_at(sizes, plain, is_bound=is_bound)
        allocated = plan_rounding(graph.device)

        def kept_bytes(value: Value) -> int:
            more = extra.get(value.name, 0)
            return 0 if more == NOT_ON_DEVICE else allocated(value.size_bytes) + more

        values = (replace(value, size_bytes=kept_bytes(value)) for value in graph.values)
        return replace(
            graph, ops=ops, values=tuple(values),
            resident=replace(graph.resident, libraries_bytes=self.libraries_at(sizes)),
            cost_origin=last.cost_origin, notes=last.notes, versions=last.versions,
        )  # fmt: skip

    def workspaces_at(self, sizes: Sizes, value_bytes: Ints, *, is_bound: bool) -> Ints:
        return self._workspaces.at(sizes, value_bytes, is_bound=is_bound)

    def libraries_at(self, sizes: Sizes) -> int:
        """What libraries hold: the most that was measured up to the next larger point."""
        return max(one.libraries_bytes for one in self.points[: self._upper(sizes) + 1])

    def extra_at(self, sizes: Sizes, value_bytes: Ints, *, is_bound: bool) -> dict[str, int]:
        """What values take beyond what their shapes say; found as workspaces are."""
        found = self._kept.at(sizes, value_bytes, is_bound=is_bound).tolist()
        named = zip(self._with_extra, found, strict=True)
        return {name: extra for name, extra in named if extra} | self._off_device

    def _upper(self, sizes: Sizes) -> int:
        return next(i for i, one in enumerate(self.points) if is_within(sizes, one.sizes))

    def _by_form(self, flops: Floats, moved: Floats) -> Floats:
        a, b, c = self._form
        return a + b * flops + c * moved


def point_of(
    sizes: Sizes, plain: TrainingGraph, costed: TrainingGraph, flops: Sequence[int]
) -> CostPoint:
    """What `costed` says of the step that `plain` has without costs."""
    allocated = plan_rounding(plain.device)
    extra: dict[str, int] = {}
    for before, after in zip(plain.values, costed.values, strict=True):
        if more := after.size_bytes - allocated(before.size_bytes):
            extra[before.name] = more if after.size_bytes else NOT_ON_DEVICE
    return CostPoint(
        sizes=dict(sizes), cost_us=tuple(op.cost_us for op in costed.ops),
        workspace_bytes=tuple(op.workspace_bytes for op in costed.ops), flops=tuple(flops),
        extra_bytes=extra, libraries_bytes=costed.resident.libraries_bytes,
        cost_origin=costed.cost_origin, origins=tuple(op.cost_origin for op in costed.ops),
        notes=costed.notes, versions=costed.versions,
    )  # fmt: skip


def _between(at: float, known: Floats, rows: Floats) -> Floats:
    """Each column of `rows`, one a point, interpolated; constant beyond the ends."""
    i = int(np.searchsorted(known, at))
    if i in (0, len(known)):
        return rows[max(i - 1, 0)]
    part = (at - known[i - 1]) / max(known[i] - known[i - 1], 1e-12)
    return rows[i - 1] + part * (rows[i] - rows[i - 1])


def _moved_bytes(graph: TrainingGraph) -> Floats:
    size = {value.name: value.size_bytes for value in graph.values}
    named = ((*op.inputs, *op.outputs) for op in graph.ops)
    moved = np.array([float(sum(size[name] for name in names)) for names in named])
    # What the whole step takes beyond its ops is added to the arrival of the tangents.
    return np.where(np.array([op.target == TANGENTS for op in graph.ops]), moved.sum(), moved)


def _fitted(costs: Floats, flops: Floats, moved: Floats) -> tuple[Floats, Floats, Floats]:
    """Coefficients of each op, 0 or more: the best of those with some of them 0."""
    columns = np.stack([np.ones_like(costs), flops, moved], axis=-1)  # points, ops, 3
    scale = np.maximum(columns.max(axis=0), 1e-300)  # columns differ by orders of magnitude
    weight = 1.0 / np.maximum(costs, 1e-9)  # the error counts relative to the cost
    table = np.swapaxes(columns / scale * weight[..., None], 0, 1)  # ops, points, 3
    wanted = np.swapaxes(costs * weight, 0, 1)[..., None]
    best = np.zeros((costs.shape[1], 3))
    least = np.full(costs.shape[1], np.inf)
    # All three would fit three points whatever they are.
    for used in (list(one) for n in (1, 2) for one in itertools.combinations(range(3), n)):
        found: Any = np.linalg.pinv(table[..., used]) @ wanted
        error = ((table[..., used] @ found - wanted) ** 2).sum(axis=(1, 2))
        error[(found < 0).any(axis=(1, 2))] = np.inf
        is_better = error < least * (1 - 1e-9)  # of two that are as good, the first has fewer terms
        least = np.where(is_better, error, least)
        own = np.zeros((costs.shape[1], 3))
        own[:, used] = found[..., 0]
        best = np.where(is_better[:, None], own, best)
    a, b, c = (best / scale).T
    return a, b, c
