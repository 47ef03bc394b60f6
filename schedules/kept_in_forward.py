"""What forward keeps for backward under a schedule: the verdict on each op, by its occurrence."""

from __future__ import annotations

from collections.abc import Sequence

from remat.graph_capture.graph import JOINED, TrainingGraph
from remat.schedules.schedule import (
    Compute,
    Fetch,
    Free,
    Offload,
    Schedule,
    Step,
    brought,
    dropped,
)


def end_of_forward(graph: TrainingGraph, schedule: Schedule) -> int | None:
    """Index after the first run of the forward op that first runs last; None if one never runs.

    Forward ends there, or right after it with the last value that leaves for the tier below: what
    is saved for backward then is that copy. A schedule has no marker for the end of forward: what
    runs again after it runs in the backward graph.
    """
    left = {op.name for op in graph.ops if op.phase == "forward"}
    for i, step in enumerate(schedule.steps):
        if not left:
            return _end_of_leaving(schedule.steps, i, graph.forward_outputs)
        if isinstance(step, Compute):
            left.discard(step.op)
    return None if left else len(schedule.steps)


def _end_of_leaving(steps: Sequence[Step], end: int, results: tuple[str, ...]) -> int:
    """After the last of the steps from `end` on, before the next op, that frees what has a copy.

    Results of forward are handed out at its end: what frees one comes after it.
    """
    below = {step.value for step in steps[:end] if isinstance(step, Offload)}
    for i in range(end, len(steps)):
        step = steps[i]
        if isinstance(step, Compute | Fetch) or (isinstance(step, Free) and step.value in results):
            break
        if isinstance(step, Offload):
            below.add(step.value)
        elif step.at == "device" and step.value in below:
            end = i + 1
    return end


def live_after_forward(graph: TrainingGraph, schedule: Schedule) -> frozenset[str]:
    """Values that are live right after the last forward op first runs."""
    live: set[str] = set()
    for step in schedule.steps[: end_of_forward(graph, schedule)]:
        if isinstance(step, Compute):
            live.update(graph.ops[graph.op_index[step.op]].outputs)
        else:
            live.update({brought(step)} - {""})
            live.discard(dropped(step))
    return frozenset(live)


def kept_occurrences(
    graph: TrainingGraph, schedule: Schedule, module: str = ""
) -> dict[str, tuple[bool, ...]]:
    """By target, such as ``aten.mm.default``: whether each of its runs in forward is kept.

    An op is kept if it runs once and leaves something live for backward. Entry i is the i-th
    run of that target in captured order. Of ops that run as one, only the last leaves anything.
    Only ops in `module`, or in modules below it, count.
    """
    live, times = live_after_forward(graph, schedule), schedule.computations()
    found: dict[str, list[bool]] = {}
    for op in graph.ops[: graph.n_forward]:
        if module and not f"{op.module}.".startswith(f"{module}."):
            continue
        kept = times[op.name] == 1 and not live.isdisjoint(op.outputs)
        *written_to, last = op.target.split(JOINED)
        for target in written_to:
            found.setdefault(target, []).append(False)
        found.setdefault(last, []).append(kept)
    return {target: tuple(kept) for target, kept in found.items()}
