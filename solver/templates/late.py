"""What is left to try where the time limit ended a search before it had any schedule.

Simple rules answer in the time that it takes to read the graph. One that fits is a plan to train
with, if not the fastest.
"""

from __future__ import annotations

import msgspec

from remat.graph_capture.errors import option
from remat.graph_capture.graph import TrainingGraph
from remat.solver.interrupts import is_interrupted
from remat.solver.result import OUT_OF_TIME, Result
from remat.solver.table import make_solver

RULES = ("selective", "keep_attention_output", "chen_sqrt", "full")
"""Rules that people write by hand, and the oldest one; each near-linear in the ops."""


def by_a_simple_rule(
    graph: TrainingGraph, budget_bytes: int, late: Result, time_limit_s: float
) -> Result:
    """The fastest rule that fits the budget, with the bound of `late`; `late` where none fits."""
    if late.schedule is not None or late.status != "time limit" or is_interrupted():
        return late
    made = [make_solver(name).solve(graph, budget_bytes) for name in RULES]
    fitting = [one for one in made if one.schedule is not None]
    if not fitting:
        return late
    best = min(fitting, key=lambda one: (one.time_us, one.peak_bytes))
    return msgspec.structs.replace(
        best,
        status="time limit",
        lower_bound_us=min(max(late.lower_bound_us, graph.time_us), best.time_us),
        wall_s=late.wall_s + sum(one.wall_s for one in made),
        floor=late.floor,
        message=f"{OUT_OF_TIME} {time_limit_s:.3g} s ended the search before it had a schedule; "
        f"this one is of a simple rule, {best.solver}. Allow a longer one for a faster one "
        f"({option('time_limit_s')})",
    )
