"""When eager runs what, and frees what it has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import msgspec

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Free, Schedule, Step


def ops_as_eager_runs(graph: TrainingGraph) -> list[int]:
    """Indices of the ops in the order in which eager runs them.

    What a checkpoint of the user's covers runs again before backward first reads what forward made
    there, up to the last op whose results backward reads (`torch.utils.checkpoint` without reentry,
    which stops early). Results that are read outside of the checkpoint stay from the first run, but
    for weights that autocast has cast: each checkpoint casts them again.
    """
    casts = _shared_casts(graph)
    covered = _by_checkpoint(graph, casts)
    lost = _lost_within(graph, casts)
    wanted = {v for op in graph.ops if op.phase == "backward" for v in op.inputs if v in lost}
    order: list[int] = []
    for i, op in enumerate(graph.ops):
        if op.phase == "backward":
            for again in dict.fromkeys(lost[v] for v in op.inputs if v in lost and v not in casts):
                order += _up_to_last(graph, covered.pop(again, []), wanted)
        order.append(i)
    return order


def _shared_casts(graph: TrainingGraph) -> set[str]:
    """Casts of what is resident that one checkpoint makes and others read."""
    of, made = graph.value_by_name, dict[str, int]()
    found: set[str] = set()
    for op in graph.ops:
        found.update(
            v for v in op.inputs if op.checkpoint and made.get(v, 0) not in (0, op.checkpoint)
        )
        is_cast = op.checkpoint and op.target == "aten._to_copy.default"
        if is_cast and not any(of[name].producer for name in op.inputs):
            made |= dict.fromkeys(op.outputs, op.checkpoint)
    return found


def _by_checkpoint(graph: TrainingGraph, casts: set[str]) -> dict[int, list[int]]:
    """The ops that run again for each checkpoint."""
    index = graph.op_index
    covered: defaultdict[int, dict[int, None]] = defaultdict(dict)
    for i, op in enumerate(graph.ops):
        if op.checkpoint:
            own = covered[op.checkpoint]
            for name in casts.intersection(op.inputs):
                own[index[graph.value_by_name[name].producer]] = None
            own[i] = None
    return {at: list(ops) for at, ops in covered.items()}


def _lost_within(graph: TrainingGraph, casts: set[str]) -> dict[str, int]:
    """For values that nothing outside of a checkpoint reads in forward: that checkpoint."""
    made = {name: op.checkpoint for op in graph.ops if op.checkpoint for name in op.outputs}
    kept = {*graph.forward_outputs, *graph.outputs}
    for op in graph.ops:
        if op.phase == "forward":
            away = (name for name in op.inputs if made.get(name, 0) != op.checkpoint)
            kept.update(name for name in away if not op.checkpoint or name not in casts)
    return {name: at for name, at in made.items() if name not in kept}


def _up_to_last(graph: TrainingGraph, covered: list[int], wanted: set[str]) -> Iterator[int]:
    making = [at for at, i in enumerate(covered) if not wanted.isdisjoint(graph.ops[i].outputs)]
    return iter(covered[: making[-1] + 1] if making else ())


def as_eager_frees(graph: TrainingGraph, schedule: Schedule) -> Schedule:
    """`schedule`, which runs ops as eager does, with values freed no sooner than eager frees them.

    What is made again is held by what made it first only until then.
    """
    until = {v.name: v.held_until for v in graph.values if v.held_until in graph.op_index}
    if not until:
        return schedule
    return msgspec.structs.replace(schedule, steps=tuple(_held(graph, schedule.steps, until)))


def _held(graph: TrainingGraph, given: tuple[Step, ...], until: dict[str, str]) -> Iterator[Step]:
    runs: defaultdict[str, list[int]] = defaultdict(list)
    for at, step in enumerate(given):
        if isinstance(step, Compute):
            runs[step.op].append(at)
    producer = {v.name: v.producer for v in graph.values}
    waiting: defaultdict[int, list[Step]] = defaultdict(list)
    for at, step in enumerate(given):
        end = _end_of(step, at, until, runs, producer) if isinstance(step, Free) else at
        if end > at:
            waiting[end].append(step)
        else:
            yield step
        yield from waiting.pop(at, ())


def _end_of(
    step: Free, at: int, until: dict[str, str], runs: dict[str, list[int]], producer: dict[str, str]
) -> int:
    """The place of the run after which eager frees a value; `at`, if it may go there."""
    ends = [one for one in runs.get(until.get(step.value, ""), ()) if one > at]
    anew = [one for one in runs[producer[step.value]] if one > at]
    return ends[0] if ends and not (anew and anew[0] < ends[0]) else at


def forward_alone(graph: TrainingGraph) -> tuple[TrainingGraph, Schedule]:
    """Forward of `graph` without its backward, and the schedule that keeps nothing for that.

    A value goes with its last use in forward, or as late as a variable there holds it.
    """
    ops = graph.ops[: graph.n_forward]
    made = {name for op in ops for name in op.outputs}
    own = msgspec.structs.replace(
        graph,
        ops=ops,
        values=tuple(v for v in graph.values if not v.producer or v.name in made),
        outputs=graph.forward_outputs,
        regions=(),
    )
    return own, Schedule.for_graph(own, _as_used(own))


def _as_used(graph: TrainingGraph) -> Iterator[Step]:
    """Each op once, and each value freed where nothing of the graph needs it any more."""
    last = {name: i for i, op in enumerate(graph.ops) for name in (*op.inputs, *op.outputs)}
    for value in graph.values:
        until = graph.op_index.get(value.held_until, -1)
        last[value.name] = max(last.get(value.name, -1), until)
    kept = {*graph.outputs, *graph.forward_outputs}
    ending: defaultdict[int, list[str]] = defaultdict(list)
    for value in graph.values:
        if value.producer and value.name not in kept:
            ending[last[value.name]].append(value.name)
    for i, op in enumerate(graph.ops):
        yield Compute(op.name)
        yield from map(Free, ending[i])
