"""What no solver may choose, and why: ops that must not run twice, and values that are held."""

from __future__ import annotations

from collections import Counter

import msgspec

from remat.graph_capture.errors import option
from remat.graph_capture.graph import Op, TrainingGraph
from remat.schedules.as_planned import as_planned
from remat.schedules.kept_in_forward import live_after_forward
from remat.schedules.schedule import Schedule
from remat.schedules.verdicts.folding import folded
from remat.schedules.verdicts.rows import value_rows

HANDED_OVER = "the step hands it over"
DRAWS = "it draws random numbers, and runs again from a saved state of the stream"


class Forced(msgspec.Struct, frozen=True):
    """Forward ops that one reason leaves no choice for.

    Attributes
    ----------
    reason : as the graph says it, or a pin of the user. ops : how many.
    kept_bytes : of their values that are live when forward ends. cost_us : of one run each.
    places : folded modules, those that hold most first.
    """

    reason: str
    ops: int
    kept_bytes: int
    cost_us: float
    places: tuple[str, ...]


def forced(graph: TrainingGraph, schedule: Schedule, most: int = 3) -> tuple[Forced, ...]:
    """What was forced, by reason; the reason that holds most comes first.

    Counted are pinned ops of forward, values in the caller's hands, and the pins of the user that
    the schedule's options name. Reasons that differ only in their module count as one. An op that
    draws is not pinned, but the state that its second run draws from is held.
    """
    graph = as_planned(graph, schedule)
    live, runs = live_after_forward(graph, schedule), schedule.computations()
    by_reason: dict[str, list[Op]] = {}
    for op in graph.ops[: graph.n_forward]:
        for reason in _reasons(graph, op, runs):
            by_reason.setdefault(reason, []).append(op)
    for name in ("keep", "recompute"):
        if name in schedule.options and not any(name in reason for reason in by_reason):
            by_reason[f"pinned by {option(name, schedule.options[name])}"] = []
    found = [_forced(graph, reason, ops, live, most) for reason, ops in by_reason.items()]
    return tuple(sorted(found, key=lambda one: (-one.kept_bytes, -one.ops)))


def _reasons(graph: TrainingGraph, op: Op, runs: Counter[str]) -> list[str]:
    reasons = [op.pinned.replace(f"{op.module}.", "")] if op.pinned else []
    if set(graph.outputs).intersection(op.outputs):
        reasons.append(HANDED_OVER)
    states = (graph.value_by_name[name].kind == "rng_state" for name in op.inputs)
    if runs[op.name] > 1 and any(states):
        reasons.append(DRAWS)
    return reasons


def _forced(
    graph: TrainingGraph, reason: str, ops: list[Op], live: frozenset[str], most: int
) -> Forced:
    names = {name for op in ops for name in op.outputs}
    rows = folded([row for row in value_rows(graph) if row.value in names])
    places = dict.fromkeys(
        row.module for row in sorted(rows, key=lambda row: -row.size_bytes) if row.module
    )
    return Forced(
        reason=reason,
        ops=len(ops),
        kept_bytes=sum(graph.value_by_name[name].size_bytes for name in names & live),
        cost_us=sum(op.cost_us for op in ops),
        places=tuple(places)[:most],
    )
