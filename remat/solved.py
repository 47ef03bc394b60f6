"""A graph with what was solved on it, and what a plan keeps of both."""

from __future__ import annotations

from typing import Any

import msgspec

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.plan import Prediction
from remat.schedules.schedule import Schedule
from remat.solver.result import Result


class Solved(msgspec.Struct, frozen=True):
    """A graph and what was solved on it."""

    graph: TrainingGraph
    result: Result


def facts_of(found: Solved) -> dict[str, Any]:
    """What `rewrite` keeps of a solve in the module's plan."""
    assert found.result.schedule is not None
    return {
        "prediction": predicted(found.result, found.graph.prices),
        "priced": graph_behind(found.graph, found.result.schedule),
    }


def graph_behind(graph: TrainingGraph, schedule: Schedule) -> TrainingGraph | None:
    """`graph`, if the schedule was made for it; None for one of the step before it is sharded."""
    return graph if graph.hash in (schedule.graph_hash, schedule.captured_hash) else None


def predicted(result: Result, prices: str) -> Prediction:
    """What a plan keeps of a result: figures of `simulate`, by such prices."""
    return Prediction(
        peak_bytes=result.peak_bytes,
        time_us=result.time_us,
        overhead=result.overhead,
        lower_bound_us=result.lower_bound_us,
        gap=result.gap,
        prices=prices,
    )
