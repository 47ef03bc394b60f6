"""From a graph over a range and a budget to a family of schedules."""

from __future__ import annotations

from typing import Any, SupportsIndex

import remat.solver as solvers
from remat.budgets import parse_budget
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.shapes.ranged_graph import RangedGraph
from remat.schedules.family import Family
from remat.solver.ranges.planning import plan_family
from remat.solver.result import Result

CUT_PART = 0.25
"""Of the time limit: what each schedule but that of the largest sizes may take at most. There are
up to eight, so that together they take at most twice as long as that."""


def solve_over(
    graph: RangedGraph,
    budget: str | SupportsIndex,
    solver: str = "auto",
    time_limit_s: float = 60.0,
    **options: Any,
) -> Family:
    """A family of schedules within `budget` at every size of the range of `graph`.

    Per cents are of the unmodified peak at the largest sizes, and ``min`` is the least peak known
    there. Parameters and errors else as of `remat.solve`.

    Raises
    ------
    TooLargeError : nothing fits at the largest sizes; it names the largest sizes that fit.
    """
    asked, bounding = parse_budget(budget), graph.bounding(graph.symbols)
    top = asked.solve(bounding, solver, time_limit_s=time_limit_s, **options)

    def solve_part(part: TrainingGraph, budget_bytes: int) -> Result:
        limit_s = CUT_PART * time_limit_s
        return solvers.solve(part, budget_bytes, solver, time_limit_s=limit_s, **options)

    return plan_family(graph, top.budget_bytes, solve_part, top)
