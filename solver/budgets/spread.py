"""Budgets of a sweep that names none: evenly from the least peak known to the unmodified one."""

from __future__ import annotations

from typing import Any

from remat.graph_capture.errors import SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import simulate
from remat.solver import solve
from remat.solver.problem import Problem, least_needed_bytes
from remat.solver.result import Result, at_least_budget
from remat.solver.store_all import StoreAll

PINS = ("keep", "recompute")


def spread(
    graph: TrainingGraph,
    count: int,
    unmodified_bytes: int = 0,
    *,
    time_limit_s: float = 60.0,
    **options: object,
) -> tuple[list[int], list[Result]]:
    """`count` budgets, evenly from the least peak that ``auto`` knows to the unmodified one.

    The same for each solver; and the outcome at the least, if it is at hand. `unmodified_bytes`
    is as in `sweep`, `time_limit_s` for naming the least peak. Of `options` only the pins are
    heeded.

    Raises
    ------
    SolverError : `count` is below 1.
    """
    if count < 1:
        raise SolverError(f"budgets must be 1 or more in number, not {count}")
    high_bytes = unmodified_bytes or keeping_all_bytes(graph)
    pins: dict[str, Any] = {name: options[name] for name in PINS if name in options}
    lost = solve(graph, 0, time_limit_s=time_limit_s, **pins)
    least_bytes = lost.least_feasible_bytes or least_needed_bytes(Problem.of(graph))
    room_bytes = max(high_bytes - least_bytes, 0)
    parts = range(count) if count > 1 else [1]
    asked = {high_bytes - room_bytes + room_bytes * k // max(count - 1, 1) for k in parts}
    least = at_least_budget(graph, lost)
    return sorted(asked), [] if least is None else [least]


def keeping_all_bytes(graph: TrainingGraph) -> int:
    """Peak of the step that keeps everything."""
    return simulate(graph, StoreAll().schedule(graph)).peak_bytes
