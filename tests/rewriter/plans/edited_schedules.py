"""Schedules that were edited by hand, and keep the hash of the graph that they were made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import ChunkedRegion, Compute, Fetch, Free, Offload, Schedule, Step

Steps = tuple[Step, ...]


def _last_pinned(graph: TrainingGraph, steps: Steps) -> int:
    """The place of the last op that draws: a second run of it would draw other numbers."""
    pinned = {op.name for op in graph.ops if op.no_recompute}
    return max(i for i, step in enumerate(steps) if isinstance(step, Compute) and step.op in pinned)


def _frees(steps: Steps) -> list[int]:
    return [i for i, step in enumerate(steps) if isinstance(step, Free)]


def _last_run(steps: Steps) -> int:
    return max(i for i, step in enumerate(steps) if isinstance(step, Compute))


def doubled(graph: TrainingGraph, steps: Steps) -> Steps:
    at = _last_run(steps)
    return steps[: at + 1] + steps[at:]


def pinned_doubled(graph: TrainingGraph, steps: Steps) -> Steps:
    at = _last_pinned(graph, steps)
    return steps[: at + 1] + steps[at:]


def dropped(graph: TrainingGraph, steps: Steps) -> Steps:
    at = _last_run(steps)
    return steps[:at] + steps[at + 1 :]


def first_dropped(graph: TrainingGraph, steps: Steps) -> Steps:
    return steps[1:]


def swapped(graph: TrainingGraph, steps: Steps) -> Steps:
    return (steps[1], steps[0], *steps[2:])


def reversed_(graph: TrainingGraph, steps: Steps) -> Steps:
    return steps[::-1]


def free_doubled(graph: TrainingGraph, steps: Steps) -> Steps:
    at = _frees(steps)[0]
    return steps[: at + 1] + steps[at:]


def free_early(graph: TrainingGraph, steps: Steps) -> Steps:
    at = _frees(steps)[0]
    return (steps[at], *steps[:at], *steps[at + 1 :])


def output_freed(graph: TrainingGraph, steps: Steps) -> Steps:
    return (*steps, Free(graph.outputs[-1]))


def unknown_op(graph: TrainingGraph, steps: Steps) -> Steps:
    return (*steps[:3], Compute("no_such_op"), *steps[3:])


def unknown_value(graph: TrainingGraph, steps: Steps) -> Steps:
    return (*steps, Free("no_such_value"))


def negative_name(graph: TrainingGraph, steps: Steps) -> Steps:
    return (*steps, Compute("-1"))


def fetched(graph: TrainingGraph, steps: Steps) -> Steps:
    return (*steps, Fetch(graph.outputs[-1]))


def offloaded(graph: TrainingGraph, steps: Steps) -> Steps:
    return (*steps, Offload(graph.outputs[-1]))


def emptied(graph: TrainingGraph, steps: Steps) -> Steps:
    return ()


EDITS: dict[str, Callable[[TrainingGraph, Steps], Steps]] = {
    "a step doubled": doubled,
    "a draw doubled": pinned_doubled,
    "a step dropped": dropped,
    "the first step dropped": first_dropped,
    "two steps swapped": swapped,
    "all steps backwards": reversed_,
    "a free doubled": free_doubled,
    "a free too early": free_early,
    "an output freed": output_freed,
    "an unknown op": unknown_op,
    "an unknown value": unknown_value,
    "an op called -1": negative_name,
    "a value that was not offloaded": fetched,
    "an output offloaded": offloaded,
    "no steps": emptied,
}


def without_frees(schedule: Schedule) -> Schedule:
    """All frees removed: it breaks no rule, but holds all that it computes."""
    kept = tuple(step for step in schedule.steps if not isinstance(step, Free))
    return msgspec.structs.replace(schedule, steps=kept)


def edited(graph: TrainingGraph, schedule: Schedule) -> dict[str, Callable[[], Schedule]]:
    """By what was edited. Some cannot even be made."""

    def replaced(**fields: Any) -> Callable[[], Schedule]:
        return lambda: msgspec.structs.replace(schedule, **fields)

    found = {name: replaced(steps=edit(graph, schedule.steps)) for name, edit in EDITS.items()}
    found["another hash"] = replaced(graph_hash="0" * 64)
    for name, chunks in CHUNKS.items():
        found[name] = replaced(chunks=(ChunkedRegion("no_such_loss", chunks),))
    absent = {"chunks": (ChunkedRegion("no_such_loss", 2),), "captured_hash": "0" * 64}
    found["chunks of a graph that is not there"] = replaced(**absent)
    found["chunks of this graph"] = replaced(**absent | {"graph_hash": "0" * 64})
    found["chunks of the same graph"] = replaced(**absent | {"captured_hash": schedule.graph_hash})
    return found


CHUNKS = {"chunks of an absent region": 2, "no chunks": 0, "negative chunks": -4}
