"""When eager frees what it has: not before a variable of the user's code lets go of it."""

from __future__ import annotations

import msgspec

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Free, Schedule, Step


def as_eager_frees(graph: TrainingGraph, schedule: Schedule) -> Schedule:
    """`schedule`, which runs each op once, with each value freed no sooner than eager frees it."""
    until = {v.name: v.held_until for v in graph.values if v.held_until in graph.op_index}
    if not until:
        return schedule
    done: set[str] = set()
    waiting: dict[str, list[Step]] = {}
    steps: list[Step] = []
    for step in schedule.steps:
        last = until.get(step.value) if isinstance(step, Free) else None
        if last is not None and last not in done:
            waiting.setdefault(last, []).append(step)
            continue
        steps.append(step)
        if isinstance(step, Compute):
            done.add(step.op)
            steps += waiting.pop(step.op, ())
    return msgspec.structs.replace(schedule, steps=tuple(steps))
