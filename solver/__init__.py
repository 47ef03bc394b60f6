"""Solvers: a training graph and a budget in, a schedule and a proven bound out. No torch."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from math import inf

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.outcome import Holding, Result
from remat.schedules.value_report.globs import Globs, as_globs
from remat.solver.reductions.reduction import Question, solve_question
from remat.solver.result import below_update, update_peak_bytes
from remat.solver.search import Listener, Progress
from remat.solver.table import (
    TABLE,
    Solver,
    budget_as_int,
    check_number,
    make_solver,
    option_names,
    solver_class,
)

__all__ = [
    "TABLE",
    "Globs",
    "Holding",
    "Progress",
    "Result",
    "Solver",
    "make_solver",
    "option_names",
    "solve_within",
    "solver_class",
]


def solve_within(
    graph: TrainingGraph, budget_bytes: int, solver: str = "auto", *, time_limit_s: float = 60.0,
    progress: Listener | None = None, keep: Globs = (), recompute: Globs = (),
    known_us: float = inf, at_hand: Result | None = None, **options: object,
) -> Result:  # fmt: skip
    """Find the schedule of least time whose true peak is within `budget_bytes`.

    `solver` is a name of `TABLE`, and `options` are its fields. The budget is on the peak, resident
    bytes included. `keep` and `recompute` are globs over module paths, see
    `remat.solver.reductions.pins`. `known_us` is the time of a schedule that is known: a solver
    that proves a bound may end where none can be faster by more than its gap. `at_hand` is the
    outcome, if known, for a graph with regions of which all run whole. SolverError: unknown solver
    or option, a value without meaning, or a glob that matches nothing or is pinned both ways. That
    nothing fits is a `Result`.
    """
    check_number("time_limit_s", time_limit_s)
    asked_bytes, least_bytes = budget_as_int(budget_bytes), update_peak_bytes(graph)
    question = Question(
        graph, max(asked_bytes, least_bytes), solver, time_limit_s, progress,
        as_globs(keep), as_globs(recompute), known_us, at_hand, options,
    )  # fmt: skip
    with _rare_collections():
        found = solve_question(question)
    return found if asked_bytes >= least_bytes else below_update(graph, found, asked_bytes)


@contextmanager
def _rare_collections() -> Generator[None]:
    """Torch leaves a million objects; to walk them for garbage took a quarter of large solves."""
    before = gc.get_threshold()
    gc.set_threshold(*map(max, before, (before[0] and 10_000, 20, 20)))  # off stays off
    try:
        yield
    finally:
        gc.set_threshold(*before)
