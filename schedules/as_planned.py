"""The graph that a schedule is of: the captured one, with regions in the pieces that it chose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from remat.graph_capture.derived.kept_with import kept_with
from remat.graph_capture.errors import ScheduleError, option
from remat.graph_capture.graph import Choice, Op, Region, TrainingGraph, Value
from remat.schedules.schedule import Pieces, Schedule

NONE = "none"
"""The split in which nothing runs in pieces."""


def as_planned(graph: TrainingGraph, schedule: Schedule) -> TrainingGraph:
    """The graph that `schedule` was made for, from the captured one; `graph` itself if it is that.

    Raises
    ------
    ScheduleError : the graph has no such region, or no such number of pieces; or they are neither
        a graph nor a schedule.
    """
    check_are_graph_and_schedule(graph, schedule)
    if not schedule.pieces or schedule.graph_hash == graph.hash:
        return graph
    return in_pieces(graph, schedule.pieces)


def check_are_graph_and_schedule(graph: object, schedule: object) -> None:
    """Raise `ScheduleError` for what else a caller has passed."""
    if not isinstance(graph, TrainingGraph):
        raise ScheduleError(
            f"a schedule goes with a graph, and this is {type(graph).__name__}: pass what "
            "remat.capture returned"
        )
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"no schedule, but {type(schedule).__name__}: pass result.schedule of what remat.solve "
            "returned (None where nothing fits), or plan.schedule"
        )


def in_pieces(graph: TrainingGraph, chosen: tuple[Pieces, ...]) -> TrainingGraph:
    """`graph` with regions in pieces; made once for each choice.

    Raises
    ------
    ScheduleError : the graph has no such region, or no such number of pieces.
    """

    def made() -> TrainingGraph:
        return with_choices(graph, {one.region: choice_of(graph, one) for one in chosen})

    return kept_with(graph, f"in pieces {chosen}", made)


def whole(graph: TrainingGraph) -> TrainingGraph:
    """`graph` whose regions cannot run in pieces; its hash is the same."""
    return msgspec.structs.replace(graph, regions=()) if graph.regions else graph


def fastest_us(graph: TrainingGraph) -> float:
    """The time of every op once, whole or in the pieces that take least: a bound on any plan's."""
    cost_us = {op.name: op.cost_us for op in graph.ops} if graph.regions else {}
    saved_us = (
        sum(cost_us[name] for name in region.ops) - sum(op.cost_us for _, op in choice.ops)
        for region in graph.regions
        for choice in region.choices
    )
    return graph.time_us - max(0.0, *saved_us) if graph.regions else graph.time_us


def within_split(graph: TrainingGraph, split: str | None) -> TrainingGraph:
    """`graph` with the pieces that a split allows: all where it is None or ``tolerance``."""
    if split in (None, "tolerance") or not graph.regions:
        return graph
    regions = (
        msgspec.structs.replace(r, choices=tuple(c for c in r.choices if c.exact and split != NONE))
        for r in graph.regions
    )
    return msgspec.structs.replace(graph, regions=tuple(r for r in regions if r.choices))


def choice_of(graph: TrainingGraph, wanted: Pieces) -> Choice:
    """What the region runs as, in the pieces that are wanted.

    Raises
    ------
    ScheduleError : the graph has no such region, or no such number of pieces.
    """
    region = next((one for one in graph.regions if one.name == wanted.region), None)
    if region is None:
        raise ScheduleError(
            f"this plan runs {wanted.region} in {wanted.pieces} pieces, and the graph has no "
            "region of that name: capture it with the split that the plan was made with, such as "
            f"{option('split', 'exact')}"
        )
    for choice in region.choices:
        if (choice.pieces, choice.exact) == (wanted.pieces, wanted.exact):
            return choice
    counts = ", ".join(str(choice.pieces) for choice in region.choices)
    raise ScheduleError(
        f"this plan runs {wanted.region} in {wanted.pieces} pieces; the graph has prices for "
        f"{counts or 'no'} pieces: capture again"
    )


def with_choices(graph: TrainingGraph, choices: Mapping[str, Choice]) -> TrainingGraph:
    """`graph` with the region of each name run as its choice says."""
    replaced = [region for region in graph.regions if region.name in choices]
    dropped = {name for region in replaced for name in region.ops}
    at: dict[str, list[Op]] = {}
    for region in replaced:
        for place, op in choices[region.name].ops:
            at.setdefault(place, []).append(op)
    kept = [op for op in graph.ops if op.name not in dropped]
    ops = (*(one for op in kept for one in (*at.get(op.name, ()), op)), *at.get("", ()))
    return msgspec.structs.replace(
        graph,
        ops=ops,
        values=tuple(_values_in_pieces(graph, replaced, choices)),
        regions=(),
        captured_us=graph.base_us,
    )


def _values_in_pieces(
    graph: TrainingGraph, replaced: Iterable[Region], choices: Mapping[str, Choice]
) -> Iterable[Value]:
    dropped = {name for region in replaced for name in region.ops}
    made = {value.name: value for one in choices.values() for value in one.values}
    yield from (v for v in graph.values if v.producer not in dropped and v.name not in made)
    yield from made.values()
