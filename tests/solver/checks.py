"""What every result and every front promises."""

from __future__ import annotations

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.simulate import simulate
from remat.solver import Result
from remat.solver.budgets.front import Front
from remat.solver.table import NEEDS_LINKS, TABLE

IGNORES_BUDGET = ("chen_sqrt",)
"""Solvers that make one schedule, whatever the budget."""
ON_THE_DEVICE = [name for name in TABLE if name not in NEEDS_LINKS]
"""Solvers that plan for graphs without links; `tests/solver/offload` has the others."""


def check(graph: TrainingGraph, result: Result, budget_bytes: int) -> None:
    """A result is consistent with the simulator and with itself."""
    assert result.budget_bytes == budget_bytes
    if result.schedule is None:
        assert result.status in ("infeasible", "none found", "time limit")
        assert result.least_feasible_bytes == 0 or result.least_feasible_bytes > budget_bytes
        return
    found = simulate(graph, result.schedule)
    assert found.peak_bytes == result.peak_bytes <= budget_bytes
    assert found.time_us == result.time_us
    assert result.schedule.budget_bytes == budget_bytes
    assert 0 < result.lower_bound_us <= result.time_us or graph.time_us == 0
    assert (result.status == "optimal") == (result.gap <= 1e-9)


def check_front(graph: TrainingGraph, found: Front) -> None:
    """Every point is valid; time and bound never rise with the budget."""
    previous: Result | None = None
    for budget_bytes, result in found.points:
        assert result.budget_bytes == budget_bytes
        if result.schedule is None:
            assert previous is None
            continue
        judged = simulate(graph, result.schedule)
        assert judged.peak_bytes == result.peak_bytes <= budget_bytes
        assert judged.time_us == result.time_us >= result.lower_bound_us
        assert result.schedule.budget_bytes == budget_bytes
        if previous is not None:
            assert result.time_us <= previous.time_us
            assert result.lower_bound_us <= previous.lower_bound_us
        previous = result
