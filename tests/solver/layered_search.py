"""A layered graph that cuts alone do not close, and what `auto` finds and tells of it."""

from __future__ import annotations

import functools
from typing import Any

from benchmarks.layered import layered_graph
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import simulate
from remat.solver import Progress, Result, solve_within
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S

GAP = 0.01
"""At which the search ends by itself in about a second, and not before some neighbourhoods."""
AROUND = "neighbourhoods"


@functools.cache
def layered() -> TrainingGraph:
    return layered_graph(60, 2, by_layers=True)


@functools.cache
def budget_bytes() -> int:
    return peak_bytes_of(layered()) * 90 // 100


@functools.cache
def found(gap: float = GAP, **options: Any) -> tuple[Result, list[Progress]]:
    """The result of `auto` on the layered graph, and all that it told."""
    heard: list[Progress] = []
    result = solve_within(
        layered(), budget_bytes(), gap=gap, time_limit_s=AMPLE_S, progress=heard.append, **options
    )
    return result, heard


@functools.cache
def schedule_of(seed: int, workers: int, attempt: int = 0) -> bytes:
    found.cache_clear()
    result, heard = found(seed=seed, workers=workers)
    assert result.status != "time limit", "such a result may differ"
    assert any(AROUND in told.doing for told in heard), "the graph is too easy"
    assert result.schedule is not None
    judged = simulate(layered(), result.schedule)
    assert judged.peak_bytes == result.peak_bytes <= budget_bytes()
    assert judged.time_us == result.time_us
    return result.schedule.to_json()
