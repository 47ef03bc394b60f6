"""Keep everything: every op once, in captured order, each value freed after its last use.

Also called: no rematerialisation, save-all, the unmodified step.
Solves: nothing; it ignores the budget. Optimal in time whenever it fits, since every op
must run at least once. Cost: O(ops + reads). Shortcomings: the peak is what it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Schedule
from remat.solver.problem import Problem
from remat.solver.result import Result, evaluate_schedule
from remat.solver.search import Listener
from remat.solver.state import State


@dataclass(frozen=True)
class StoreAll:
    """Solver that recomputes nothing."""

    time_limit_s: float = 60.0
    progress: Listener | None = None

    def schedule(self, graph: TrainingGraph) -> Schedule:
        return store_all_state(Problem.of(graph)).schedule(solver="store_all")

    def solve(self, graph: TrainingGraph, budget_bytes: int) -> Result:
        made = store_all_state(Problem.of(graph))
        return evaluate_schedule(
            graph,
            made.schedule(budget_bytes=budget_bytes, solver="store_all"),
            budget_bytes=budget_bytes,
            lower_bound_us=graph.time_us,
        )


def store_all_state(problem: Problem) -> State:
    return State.from_recomputed(problem, [()] * (problem.n_ops + 1))
