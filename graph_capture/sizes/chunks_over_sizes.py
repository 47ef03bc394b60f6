"""Heads of a trace for a range of sizes in chunks: measured, and compared with eager, at a few."""

from __future__ import annotations

import dataclasses
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from remat.graph_capture.chunking.blocks import LEAST_ROWS
from remat.graph_capture.chunking.head import Head
from remat.graph_capture.chunking.regions import (
    AND,
    RegionCandidate,
    find_regions,
    requested_heads,
)
from remat.graph_capture.chunking.replace import find_parts
from remat.graph_capture.chunking.same_bits import kept_bits
from remat.graph_capture.devices.known_devices import plan_rounding
from remat.graph_capture.devices.placement import meter_of
from remat.graph_capture.errors import option
from remat.graph_capture.graph import Choice, Region, TrainingGraph, Value
from remat.graph_capture.sizes.at_sizes import trace_at
from remat.graph_capture.sizes.ranged_chunks import ChunkPoint, Extent, RangedChoice
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.sizes.symbols import Sizes, corner, evaluated, spread
from remat.graph_capture.sizes.trace_over_sizes import SYMBOLIC
from remat.graph_capture.tracing.traced_step import Trace

RegionsInChunks = Callable[[Trace, TrainingGraph, Sequence[RegionCandidate]], TrainingGraph]
"""From a trace at one size and its graph with costs to the graph with these regions."""
_COMPARED = 4  # sizes at which bits are compared: both ends and some between


class _Measured(NamedTuple):
    sizes: Sizes
    graph: TrainingGraph  # whole, with costs
    region: Region
    names: Mapping[str, str]  # of its own ops, the part that each is of


def with_chunks(trace: Trace, graph: RangedGraph, in_chunks: RegionsInChunks) -> RangedGraph:
    """`graph` with the heads that the recipe asks for, each in the numbers of chunks that give
    eager's bits at all sizes that are compared. MLPs stay whole."""
    top = _asked_at(trace, corner(graph.symbols, "high"))
    wanted = requested_heads(top)
    if not wanted or not graph.points or not _are_rows_all(trace, wanted[0]):
        return graph
    # The largest first: what is beyond the memory ends it there.
    points = [point.sizes for point in reversed(graph.points)]
    measured = [
        one for sizes in points for one in _measured_at(trace, graph, sizes, wanted[0], in_chunks)
    ]
    if len(measured) < len(points):
        return graph
    rows = _rows_of(trace, wanted[0])
    found = (_choice(graph, measured[::-1], rows, one) for one in measured[0].region.choices)
    choices = [one for one in found if one is not None]
    return replace(graph, choices=tuple(_compared(trace, wanted[0], choices)))


def _asked_at(trace: Trace, sizes: Sizes) -> Trace:
    found = trace_at(trace, sizes)
    return dataclasses.replace(
        found, recipe=dataclasses.replace(found.recipe, split=trace.recipe.split)
    )


def _are_rows_all(trace: Trace, wanted: RegionCandidate) -> bool:
    """Whether no loss takes a part of its rows, which an op would be told in numbers."""
    cut = [one for one in wanted.parts if isinstance(one, Head) and one.grid]
    if cut and trace.recipe.split is not None:
        warnings.warn(
            f"the loss of {cut[0].name} stays whole over a range: it reads a part of the rows of "
            "the logits. Have it read all, with targets to ignore in place of the others",
            stacklevel=4,
        )
    return not cut


def _measured_at(
    trace: Trace,
    graph: RangedGraph,
    sizes: Sizes,
    wanted: RegionCandidate,
    in_chunks: RegionsInChunks,
) -> Iterator[_Measured]:
    traced, costed = _asked_at(trace, sizes), graph.at(**sizes)
    names = frozenset(part.name for part in wanted.parts)
    found = find_regions(traced, wanted.is_exact, names)
    for region in in_chunks(traced, costed, found).regions:
        of_op = {node.name: part.name for part, node in found[0].by_node()}
        if region.name == wanted.name:
            yield _Measured(sizes, costed, region, of_op)


def _rows_of(trace: Trace, wanted: RegionCandidate) -> dict[str, str]:
    """By head, the rows of its logits as an expression."""
    assert trace.env is not None
    names = frozenset(part.name for part in wanted.parts)
    found: dict[str, str] = {}
    for part in find_parts(trace.joint.module.graph, names):
        assert isinstance(part, Head)
        traced: Any = part.softmax.meta[SYMBOLIC]
        found[part.name] = trace.env.text(traced.shape[0])
    return found


def _choice(
    graph: RangedGraph, measured: Sequence[_Measured], rows: Mapping[str, str], top: Choice
) -> RangedChoice | None:
    """One number of chunks over the range; None where it is not known at each measured size."""
    found = [
        next((one for one in at.region.choices if one.chunks == top.chunks), None)
        for at in measured
    ]
    choices = [one for one in found if one is not None]
    if len(choices) < len(measured):
        return None
    of_op = measured[-1].names
    cut = tuple(rows.get(of_op.get(op.name, ""), "") for _, op in top.ops)
    high = measured[-1].sizes
    few = any(evaluated(text, high) < LEAST_ROWS * top.chunks for text in cut if text)
    extents = _extents(graph, measured, choices, rows)
    if few or extents is None:
        return None
    points = tuple(
        ChunkPoint(
            tuple(op.cost_us for _, op in one.ops), tuple(op.workspace_bytes for _, op in one.ops),
            tuple(evaluated(text, at.sizes) if text else 0 for text in cut),
        )
        for one, at in zip(choices, measured, strict=True)
    )  # fmt: skip
    region = measured[-1].region
    return RangedChoice(
        region.name, top.chunks, top.exact, region.ops, top.ops, top.values, extents, cut, points
    )


def _extents(
    graph: RangedGraph, measured: Sequence[_Measured], choices: Sequence[Choice],
    rows: Mapping[str, str],
) -> dict[str, Extent] | None:  # fmt: skip
    """Of values that vary: as captured, or one number for each row. None where neither holds."""
    found: dict[str, Extent] = {}
    allocated = plan_rounding(graph.base.device)
    for same in zip(*(one.values for one in choices), strict=True):
        ways = [_fixed(same[-1])]
        ways += [extent for name, extent in graph.extents.items() if name == same[-1].name]
        ways += [_a_number_a_row(text, same[-1]) for text in rows.values()]
        pairs = [(value, one.sizes) for value, one in zip(same, measured, strict=True)]
        extent = next((one for one in ways if _holds(one, pairs, allocated)), None)
        if extent is None:
            return None
        if extent is not ways[0]:
            found[same[-1].name] = extent
    return found


def _fixed(value: Value) -> Extent:
    return Extent(tuple(map(str, value.shape)), str(value.size_bytes))


def _a_number_a_row(rows: str, value: Value) -> Extent:
    n_bytes = value.size_bytes // max(value.shape[0] if value.shape else 1, 1)
    return Extent((rows, *map(str, value.shape[1:])), f"{n_bytes}*({rows})")


def _holds(
    extent: Extent, pairs: Sequence[tuple[Value, Sizes]], allocated: Callable[[int], int]
) -> bool:
    return all(
        tuple(evaluated(text, sizes) for text in extent.shape) == value.shape
        and allocated(evaluated(extent.size_bytes, sizes)) == value.size_bytes
        for value, sizes in pairs
    )


def _compared(
    trace: Trace, wanted: RegionCandidate, choices: list[RangedChoice]
) -> list[RangedChoice]:
    """Those of `choices` that give eager's bits at more sizes, with their workspaces there."""
    if trace.recipe.is_modelled or not choices:  # bits are compared on the device that trains
        return choices
    found = _regions_at(trace, wanted.name, _compared_sizes(trace), is_exact=wanted.is_exact)
    counts = [one.chunks for one in choices]
    exact = _exact_counts(trace, found, counts) if wanted.is_exact else counts
    if trace.recipe.split is not None and not exact:
        warnings.warn(
            f"the loss of {wanted.name} stays whole: in chunks its bits would differ from eager's "
            f"at some sizes of the range. Allow that with {option('split', 'tolerance')}",
            stacklevel=4,
        )
    return [_measured_further(trace, found, one) for one in choices if one.chunks in exact]


_Sized = tuple[Sizes, RegionCandidate]


def _measured_further(trace: Trace, compared: list[_Sized], one: RangedChoice) -> RangedChoice:
    from remat.graph_capture.costs.op_costs import measured_in_chunks  # which only real devices run

    # From where on blocks grow with the rows.
    first = _first_with_rows(trace, one.rows, LEAST_ROWS * one.chunks)
    more = _regions_at(trace, one.region, first, is_exact=one.exact)
    points = {point.rows: point for point in one.points}
    known = [op.workspace_bytes for _, op in one.ops]
    for sizes, found in (*compared, *more):
        rows = tuple(evaluated(text, sizes) if text else 0 for text in one.rows)
        if rows not in points:
            made = measured_in_chunks(found.set_chunks(one.chunks))
            names = (op.name for _, op in one.ops)
            taken = (made.get(name, before) for name, before in zip(names, known, strict=True))
            points[rows] = ChunkPoint((), tuple(taken), rows)
    return replace(one, points=tuple(points[rows] for rows in sorted(points)))


def _first_with_rows(trace: Trace, rows: Sequence[str], least: int) -> list[Sizes]:
    """The first size of a range of one with so many rows; none where several sizes vary."""
    assert trace.env is not None
    text = next(text for text in rows if text)
    if len(trace.env.symbols) != 1:
        return []
    (symbol,) = trace.env.symbols
    at = bisect_left(symbol.sizes, least, key=lambda size: evaluated(text, {symbol.name: size}))
    return [{symbol.name: size} for size in symbol.sizes[at : at + 1]]


def exact_counts(trace: Trace, region: str, counts: Sequence[int]) -> list[int]:
    """Those numbers of chunks in which a region gives eager's bits at some sizes of the range."""
    found = _regions_at(trace, region, _compared_sizes(trace), is_exact=True)
    return _exact_counts(trace, found, counts)


def _exact_counts(trace: Trace, compared: list[_Sized], counts: Sequence[int]) -> list[int]:
    has_them, left = kept_bits(meter_of(trace.recipe.device)), list(counts)
    for _, found in compared:
        left = [chunks for chunks in left if has_them(found.set_chunks(chunks))]
    return left


def _regions_at(
    trace: Trace, region: str, sizes: Iterable[Sizes], *, is_exact: bool
) -> list[_Sized]:
    names = region.split(AND)
    return [(at, one) for at in sizes for one in find_regions(trace_at(trace, at), is_exact, names)]


def _compared_sizes(trace: Trace) -> Iterator[Sizes]:
    assert trace.env is not None
    some = {s.name: spread(s.sizes, _COMPARED) for s in trace.env.symbols}
    for i in range(_COMPARED):
        yield {name: sizes[min(i, len(sizes) - 1)] for name, sizes in some.items()}
    # Beside the largest, where blocks are not all of one length.
    yield {symbol.name: symbol.sizes[-2] for symbol in trace.env.symbols}
