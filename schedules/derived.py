"""Graphs and schedules made of others: with chunks and levers, before sharding, from blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from remat.graph_capture.distributed.sharded_step import COMMUNICATION, beside_communication
from remat.graph_capture.eager_step import with_ops_replaced
from remat.graph_capture.errors import ScheduleError, option
from remat.graph_capture.graph import Choice, Op, TrainingGraph, cached_on
from remat.schedules.schedule import ChunkedRegion, Compute, Free, Schedule, Step


def graph_of_schedule(graph: TrainingGraph, schedule: Schedule) -> TrainingGraph:
    """The graph that `schedule` was made for, from the captured `graph` or that itself."""
    check_are_graph_and_schedule(graph, schedule)
    is_other = schedule.graph_hash != graph.hash
    if is_other and (schedule.chunks or schedule.captured_hash == graph.hash):
        return _as_changed(graph, schedule)
    return graph


def _as_changed(graph: TrainingGraph, schedule: Schedule) -> TrainingGraph:
    if schedule.chunks:
        return in_chunks(graph, schedule.chunks)
    for one in schedule.levers:  # each edits what the one before it made
        graph = one.on(graph)
    return graph


def check_are_graph_and_schedule(graph: object, schedule: object) -> None:
    if not isinstance(graph, TrainingGraph):
        raise ScheduleError(
            "pass what remat.capture returned: a schedule goes with a graph, and this is "
            f"{type(graph).__name__}"
        )
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            "pass result.schedule of what remat.solve returned (None where nothing fits), or "
            f"plan.schedule: this is {type(schedule).__name__}"
        )


def in_chunks(graph: TrainingGraph, chosen: tuple[ChunkedRegion, ...]) -> TrainingGraph:
    """`graph` with regions in chunks; raises `ScheduleError` for a choice that it has not."""

    def made() -> TrainingGraph:
        return with_choices(graph, {one.region: choice_of(graph, one) for one in chosen})

    return cached_on(graph, f"in chunks {chosen}", made)  # every simulation asks for it


def unchunked(graph: TrainingGraph) -> TrainingGraph:
    # The hash leaves regions out, so schedules of one graph are schedules of the other.
    return msgspec.structs.replace(graph, regions=()) if graph.regions else graph


def fastest_us(graph: TrainingGraph) -> float:
    """The time of every op once, whole or in the chunks that take least: a bound on any plan's."""
    cost_us = {op.name: op.cost_us for op in graph.ops} if graph.regions else {}
    saved_us = (
        sum(cost_us[name] for name in region.ops) - sum(op.cost_us for _, op in choice.ops)
        for region in graph.regions
        for choice in region.choices
    )
    # A schedule runs at most one region in chunks, so savings do not add up.
    return graph.time_us - max(0.0, *saved_us) if graph.regions else graph.time_us


def within_split(graph: TrainingGraph, split: str | None) -> TrainingGraph:
    if split in (None, "tolerance") or not graph.regions:
        return graph
    # With "none" nothing runs in chunks.
    kept = [(r, tuple(c for c in r.choices if c.exact and split != "none")) for r in graph.regions]
    regions = tuple(msgspec.structs.replace(r, choices=choices) for r, choices in kept if choices)
    return msgspec.structs.replace(graph, regions=regions)


def choice_of(graph: TrainingGraph, wanted: ChunkedRegion) -> Choice:
    """What the region runs as; raises `ScheduleError` if the graph has not these chunks."""
    region = next((one for one in graph.regions if one.name == wanted.region), None)
    if region is None:
        raise ScheduleError(
            "capture with the split that the plan was made with, such as "
            f"{option('split', 'exact')}: this plan runs {wanted.region} in {wanted.chunks} "
            "chunks, and the graph has no region of that name"
        )
    for choice in region.choices:
        if (choice.chunks, choice.exact) == (wanted.chunks, wanted.exact):
            return choice
    counts = ", ".join(str(choice.chunks) for choice in region.choices)
    raise ScheduleError(
        f"capture again: this plan runs {wanted.region} in {wanted.chunks} chunks, and the graph "
        f"has costs for {counts or 'no'} chunks"
    )


def with_choices(graph: TrainingGraph, choices: Mapping[str, Choice]) -> TrainingGraph:
    replaced = [region for region in graph.regions if region.name in choices]
    places = beside_communication(graph.ops)
    return with_ops_replaced(
        graph,
        (name for region in replaced for name in region.ops),
        ((places.get(at, at), op) for one in replaced for at, op in choices[one.name].ops),
        (value for one in choices.values() for value in one.values),
    )


def before_sharding(schedule: Schedule, sharded: TrainingGraph, own: TrainingGraph) -> Schedule:
    """`schedule`, made for a rank's step `sharded`, of `own`, which lacks what its wrapper adds.

    `own` has the regions that the schedule runs in chunks.
    """
    names = [{one.name for one in (*graph.ops, *graph.values)} for graph in (sharded, own)]
    if not (added := names[0] - names[1]):
        return schedule
    # Communication comes before forward, between the phases and last, so the rest keeps its order.
    steps = [step for step in schedule.steps if _subject(step) not in added]
    # The wrapper frees gradients once it has reduced them.
    end = max(i for i, step in enumerate(steps) if isinstance(step, Compute))
    made = schedule.with_steps(_as_changed(own, schedule), steps[: end + 1])
    if not schedule.captured_hash:
        return made
    return msgspec.structs.replace(
        made, chunks=schedule.chunks, levers=schedule.levers, captured_hash=own.hash
    )


def _subject(step: Step) -> str:
    return step.op if isinstance(step, Compute) else step.value


class _Item(NamedTuple):
    steps: tuple[Step, ...]
    is_forward: bool


def assembled(
    graph: TrainingGraph,
    steps_of: Mapping[str, tuple[Sequence[Step], Sequence[Step]]],
    path_of: Mapping[str, str],
) -> Schedule:
    """The schedule of a whole step from those of its blocks, which free only what is their own."""
    items, begun = list[_Item](), set[tuple[str, str]]()
    for op in graph.ops:
        path = path_of.get(op.name)
        is_forward = op.phase == "forward"
        if path is None:
            items.append(_Item((Compute(op.name),), is_forward))
        elif (path, op.phase) not in begun:
            begun.add((path, op.phase))
            items.append(_Item(tuple(steps_of[path][0 if is_forward else 1]), is_forward))
    return Schedule.for_graph(graph, _with_frees(graph, items), solver="blocks")


def _op(graph: TrainingGraph, name: str) -> Op:
    return graph.ops[graph.op_index[name]]


def _with_frees(graph: TrainingGraph, items: Sequence[_Item]) -> list[Step]:
    of_forward = {v for op in graph.ops if op.phase == "forward" for v in op.outputs}
    at_step, at_end = dict[tuple[int, int], list[str]](), dict[int, list[str]]()
    for value, (i, j) in _last_touches(graph, items).items():
        # As in autograd: what a call gets lives as long as the call, what forward saved until
        # backward last reads it. A collective holds its buffers while it runs.
        if (items[i].is_forward or value not in of_forward) and not _lets_go(graph, items[i], j):
            at_end.setdefault(i, []).append(value)
        else:
            at_step.setdefault((i, j), []).append(value)
    steps: list[Step] = []
    for i, item in enumerate(items):
        for j, step in enumerate(item.steps):
            steps.append(step)
            steps.extend(map(Free, at_step.get((i, j), ())))
        steps.extend(map(Free, at_end.get(i, ())))
    return steps


def _lets_go(graph: TrainingGraph, item: _Item, j: int) -> bool:
    if j >= len(item.steps):
        return False
    step = item.steps[j]
    return isinstance(step, Compute) and _op(graph, step.op).target in COMMUNICATION


def _last_touches(graph: TrainingGraph, items: Sequence[_Item]) -> dict[str, tuple[int, int]]:
    # Resident values, outputs of the step, and what a block frees itself are not freed here.
    lasting = {value.name for value in graph.values if not value.producer} | set(graph.outputs)
    lasting |= {step.value for item in items for step in item.steps if isinstance(step, Free)}
    last: dict[str, tuple[int, int]] = {}
    for i, item in enumerate(items):
        for j, step in enumerate(item.steps):
            if isinstance(step, Compute):
                op = _op(graph, step.op)
                touched = (value for value in (*op.inputs, *op.outputs) if value not in lasting)
                last.update(dict.fromkeys(touched, (i, j)))
    end = max((i for i, item in enumerate(items) if item.is_forward), default=0)
    # Forward returns them when it ends, even if their last reader ran earlier.
    for value in graph.forward_outputs:
        if value in last:
            last[value] = max(last[value], (end, len(items[end].steps)))
    return last
