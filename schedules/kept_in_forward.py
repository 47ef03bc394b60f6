"""What forward keeps for backward under a schedule: the verdict on each op, by its occurrence."""

from __future__ import annotations

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Schedule, brought, dropped


def end_of_forward(graph: TrainingGraph, schedule: Schedule) -> int | None:
    """Index after the first run of the forward op that first runs last; None if one never runs.

    Forward ends there. A schedule has no marker for it: what runs again after that point runs in
    the backward graph.
    """
    left = {op.name for op in graph.ops if op.phase == "forward"}
    for i, step in enumerate(schedule.steps):
        if not left:
            return i
        if isinstance(step, Compute):
            left.discard(step.op)
    return None if left else len(schedule.steps)


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
    run of that target in captured order. Only ops in `module`, or in modules below it, count.
    """
    live, times = live_after_forward(graph, schedule), schedule.computations()
    found: dict[str, list[bool]] = {}
    for op in graph.ops[: graph.n_forward]:
        if module and not f"{op.module}.".startswith(f"{module}."):
            continue
        kept = times[op.name] == 1 and not live.isdisjoint(op.outputs)
        found.setdefault(op.target, []).append(kept)
    return {target: tuple(kept) for target, kept in found.items()}
