"""What forward keeps for backward under a schedule, and the order in which eager runs and frees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from remat.graph_capture.graph import JOINED, TrainingGraph
from remat.schedules.schedule import (
    Compute,
    Fetch,
    Free,
    Offload,
    Schedule,
    Step,
    arriving_values,
    freed_value,
)


def end_of_forward(graph: TrainingGraph, schedule: Schedule) -> int | None:
    """Index after the first run of the forward op that first runs last; None if one never runs."""
    left = {op.name for op in graph.ops if op.phase == "forward"}  # later runs are in backward
    for i, step in enumerate(schedule.steps):
        if not left:
            # What leaves for the host right here is saved for backward as its copy there.
            return _end_of_leaving(schedule.steps, i, graph.forward_outputs)
        if isinstance(step, Compute):
            left.discard(step.op)
    return None if left else len(schedule.steps)


def _end_of_leaving(steps: Sequence[Step], end: int, results: tuple[str, ...]) -> int:
    """Index after the last step from `end` on, before the next op, that frees what has a copy."""
    below = {step.value for step in steps[:end] if isinstance(step, Offload)}
    for i in range(end, len(steps)):
        step = steps[i]
        # Forward returns its results at its end.
        if isinstance(step, Compute | Fetch) or (isinstance(step, Free) and step.value in results):
            break
        if isinstance(step, Offload):
            below.add(step.value)
        elif step.at == "device" and step.value in below:
            end = i + 1
    return end


def live_after_forward(graph: TrainingGraph, schedule: Schedule) -> frozenset[str]:
    live: set[str] = set()
    for step in schedule.steps[: end_of_forward(graph, schedule)]:
        live.update(arriving_values(graph, step))
        live.discard(freed_value(step))
    return frozenset(live)


def kept_occurrences(
    graph: TrainingGraph, schedule: Schedule, module: str = ""
) -> dict[str, tuple[bool, ...]]:
    """By target: whether each run in forward is kept, in captured order, of ops in `module`."""
    live, times = live_after_forward(graph, schedule), schedule.computations()
    found: dict[str, list[bool]] = {}
    for op in graph.ops[: graph.n_forward]:
        if module and not f"{op.module}.".startswith(f"{module}."):
            continue
        # An op that runs again saves nothing, nor does one with dead outputs.
        kept = times[op.name] == 1 and not live.isdisjoint(op.outputs)
        # Of ops that run as one, the others write into the last one's output: only it saves.
        *written_to, last = op.target.split(JOINED)
        for target in written_to:
            found.setdefault(target, []).append(False)
        found.setdefault(last, []).append(kept)
    return {target: tuple(kept) for target, kept in found.items()}


def ops_as_eager_runs(graph: TrainingGraph) -> list[int]:
    casts = _shared_casts(graph)
    covered = _by_checkpoint(graph, casts)
    lost = _lost_within(graph, casts)
    wanted = {v for op in graph.ops if op.phase == "backward" for v in op.inputs if v in lost}
    order: list[int] = []
    for i, op in enumerate(graph.ops):
        if op.phase == "backward":  # a checkpoint reruns before backward first reads from inside
            for again in dict.fromkeys(lost[v] for v in op.inputs if v in lost and v not in casts):
                ops = covered.pop(again, [])
                makes = [not wanted.isdisjoint(graph.ops[i].outputs) for i in ops]
                # Non-reentrant checkpoints stop at the last op whose outputs are read.
                order += ops[: len(ops) - makes[::-1].index(True)] if any(makes) else []
        order.append(i)
    return order


def _shared_casts(graph: TrainingGraph) -> set[str]:
    """Casts of resident values that one checkpoint makes and others read from autocast's cache."""
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
    index = graph.op_index
    covered: defaultdict[int, dict[int, None]] = defaultdict(dict)
    for i, op in enumerate(graph.ops):
        if op.checkpoint:
            own = covered[op.checkpoint]
            # The cache is gone by backward: each casts the weights again.
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
            # What forward reads outside stays from the first run.
            away = (name for name in op.inputs if made.get(name, 0) != op.checkpoint)
            kept.update(name for name in away if not op.checkpoint or name not in casts)
    return {name: at for name, at in made.items() if name not in kept}


def as_eager_frees(graph: TrainingGraph, schedule: Schedule) -> Schedule:
    """`schedule`, which runs ops as eager does, with no value freed sooner than eager frees it."""
    until = {v.name: v.held_until for v in graph.values if v.held_until in graph.op_index}
    if not until:
        return schedule
    return replace(schedule, steps=tuple(_held(graph, schedule.steps, until)))


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
    # A value that is made again before that holds its first copy only until then.
    return ends[0] if ends and not (anew and anew[0] < ends[0]) else at


def forward_alone(graph: TrainingGraph) -> tuple[TrainingGraph, Schedule]:
    ops = graph.ops[: graph.n_forward]
    made = {name for op in ops for name in op.outputs}
    values = tuple(v for v in graph.values if not v.producer or v.name in made)
    own = replace(graph, ops=ops, values=values, outputs=graph.forward_outputs, regions=())
    return own, Schedule.for_graph(own, _as_used(own))


def _as_used(graph: TrainingGraph) -> Iterator[Step]:
    # A value that nothing reads goes right after its op.
    last = {name: i for i, op in enumerate(graph.ops) for name in (*op.inputs, *op.outputs)}
    for value in graph.values:
        # A variable of the user's may hold a value beyond its last use.
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
