"""Schedules with copies, made of schedules without: by hand, or at random."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from remat.graph_capture.errors import ScheduleError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule, Step
from remat.schedules.simulate import simulate

Gap = tuple[str, int, int]
"""A value, and the indices of two steps that read or make it, none between them."""


def gaps(graph: TrainingGraph, schedule: Schedule) -> Iterator[Gap]:
    """The times in which a value lies on the device and no op needs it."""
    last: dict[str, int] = {}
    for i, step in enumerate(schedule.steps):
        if isinstance(step, Compute):
            op = graph.ops[graph.op_index[step.op]]
            for value in (*op.inputs, *op.outputs):
                if value in last and i - last[value] > 1:
                    yield value, last[value], i
                if graph.value_by_name[value].producer:
                    last[value] = i
        elif isinstance(step, Free) and step.at == "device":
            last.pop(step.value, None)
        elif isinstance(step, Fetch) and step.to == "device":
            last[step.value] = i


def inserted(schedule: Schedule, placed: Iterable[tuple[int, Step]]) -> Schedule:
    """`schedule` with each step before the one that had that index, or before the next that is no
    `Free`: generated code drops a value right after its last reader. Equal places keep their order.
    """
    before: dict[int, list[Step]] = {}
    for at, step in placed:
        while at < len(schedule.steps) and isinstance(schedule.steps[at], Free):
            at += 1
        before.setdefault(at, []).append(step)
    steps: list[Step] = []
    for i, step in enumerate((*schedule.steps, None)):
        steps += before.get(i, [])
        if step is not None:
            steps.append(step)
    return msgspec.structs.replace(schedule, steps=tuple(steps))


def out_at_once(
    graph: TrainingGraph,
    schedule: Schedule,
    values: Sequence[str],
    *,
    behind: int = 6,
    ahead: int = 12,
) -> Schedule:
    """Copies of `values`: out after the touch before their longest gap, and back before its end.

    Each leaves the device some steps later, and is fetched some steps before it is needed.
    """
    placed: list[tuple[int, Step]] = []
    longest: dict[str, Gap] = {}
    for gap in gaps(graph, schedule):
        if gap[0] in values and gap[2] - gap[1] > length(longest.get(gap[0])):
            longest[gap[0]] = gap
    for value, begin, end in longest.values():
        away = min(begin + 1 + behind, end)
        back = max(end - ahead, away)
        placed += [
            (begin + 1, Offload(value)),
            (away, Free(value)),
            (back, Fetch(value)),
            (end, Free(value, "host")),
        ]
    placed.sort(key=lambda one: one[0])
    return inserted(schedule, placed)


def length(gap: Gap | None) -> int:
    return gap[2] - gap[1] if gap else 0


def with_random_copies(
    graph: TrainingGraph, schedule: Schedule, seed: int, *, tries: int = 12
) -> Schedule:
    """Copies of some values, at any moment at which `simulate` allows them, some through NVMe."""
    drawn = random.Random(seed)
    for _ in range(tries):
        found = [gap for gap in gaps(graph, schedule) if is_counted(graph, gap)]
        if not found:
            break
        copied = inserted(schedule, _copies_in(drawn.choice(found), drawn, len(schedule.steps)))
        try:
            simulate(graph, copied)
        except ScheduleError:
            continue  # such as a result that the caller holds
        schedule = copied
    return schedule


def is_counted(graph: TrainingGraph, gap: Gap) -> bool:
    return graph.value_by_name[gap[0]].size_bytes > 0


def _copies_in(gap: Gap, drawn: random.Random, n_steps: int) -> list[tuple[int, Step]]:
    value, begin, end = gap
    out, away, down, up, back = sorted(drawn.choices(range(begin + 1, end + 1), k=5))
    dropped = drawn.choice([back, end, drawn.randint(back, n_steps)])
    steps: list[tuple[int, Step]] = [(out, Offload(value)), (away, Free(value))]
    if drawn.random() < 0.3:
        steps += [(down, Offload(value, "nvme")), (down, Free(value, "host"))]
        steps += [(up, Fetch(value, "host"))]
        steps += [(up, Free(value, "nvme"))] if drawn.random() < 0.5 else []
    steps += [(back, Fetch(value)), (dropped, Free(value, "host"))]
    if not any(isinstance(step, Free) and step.at == "nvme" for _, step in steps):
        steps += [(n_steps, Free(value, "nvme"))] * any(
            isinstance(step, Offload) and step.to == "nvme" for _, step in steps
        )
    return steps
