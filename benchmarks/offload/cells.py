"""One plan each: at a budget, at another rate of the links, and on links slower than planned.

Every time, overhead and peak is what `simulate` says of the schedule. Bounds are what the solver
has proved.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from benchmarks import GAP_OF_FIGURES
from benchmarks.offload.steps import links
from remat.graph_capture.graph import Links, TrainingGraph
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import overhead_of, simulate
from remat.solver import TABLE, Result, solve_within
from remat.solver.bounds.least_peak import floor_of
from remat.solver.problem import Problem
from remat.solver.search import Listener, Progress
from remat.solver.state import store_all_state
from remat.solver.table import NEEDS_LINKS

RECOMPUTE, JOINT = "recompute", "joint"
"""`auto` without links, and the solver that has both."""
PLANNERS = (RECOMPUTE, *NEEDS_LINKS, JOINT)
RATES_GB_S = (2.0, 4.0, 8.0, 16.0, 25.6, 51.2, 100.0, 200.0)
SLOWER = (1.0, 0.95, 0.9, 0.8)
"""Shares of the planned rate at which a plan is judged again."""
CAUTION = (1.0, 0.9, 0.8)
"""Shares of the true rate for which plans are made."""


def is_here(planner: str) -> bool:
    """Whether this release has that planner."""
    return planner == RECOMPUTE or planner in TABLE


def size_facts(graph: TrainingGraph) -> dict[str, Any]:
    """Ops, time, the unmodified peak, and the floor of schedules in captured order."""
    problem = Problem.of(graph)
    return {
        "ops": len(graph.ops),
        "time_us": graph.time_us,
        "peak_bytes": int(store_all_state(problem).peak_bytes.max()),
        "floor_bytes": floor_of(problem).size_bytes,
        "hash": graph.hash,
    }


def budget_of(facts: dict[str, Any], fraction: float) -> int:
    """The floor, and that fraction of what the unmodified peak has beyond it."""
    beyond = facts["peak_bytes"] - facts["floor_bytes"]
    return int(facts["floor_bytes"] + fraction * beyond)


def planned(
    graph: TrainingGraph,
    budget_bytes: int,
    planner: str,
    limit_s: float,
    listener: Listener | None = None,
) -> Result:
    """What that planner makes of the step."""
    alone = msgspec.structs.replace(graph, links=None)
    one, solver = (alone, "auto") if planner == RECOMPUTE else (graph, planner)
    return solve_within(
        one, budget_bytes, solver, time_limit_s=limit_s, progress=listener, gap=GAP_OF_FIGURES
    )


def plan_cell(
    graph: TrainingGraph, budget_bytes: int, planner: str, limit_s: float
) -> dict[str, Any]:
    """The figures of one plan."""
    began_s, found_s = time.monotonic(), list[float]()

    def listener(progress: Progress) -> None:
        if progress.best_overhead is not None and not found_s:
            found_s.append(time.monotonic() - began_s)

    result = planned(graph, budget_bytes, planner, limit_s, listener)
    seconds = time.monotonic() - began_s
    cell: dict[str, Any] = {
        "solver": planner,
        "budget_bytes": budget_bytes,
        "status": result.status,
        "seconds": seconds,
        "first_s": found_s[0] if found_s else seconds,
        "bound_overhead": overhead_of(result.lower_bound_us, graph.base_us),
        "time_limit_s": limit_s,
        "overhead": None,
    }
    if result.schedule is None:
        return cell
    return cell | judged_facts(graph, result.schedule, graph.links) | {"gap": result.gap}


def judged_facts(graph: TrainingGraph, schedule: Schedule, found: Links | None) -> dict[str, Any]:
    """What the simulator says of a schedule on those links."""
    said = simulate(graph, schedule, found)
    return {
        "overhead": said.overhead,
        "peak_bytes": said.peak_bytes,
        "stall_share": said.stall_us / said.time_us,
        "hosted_bytes": said.moved_bytes["d2h"],
        "host_peak_bytes": said.host_peak_bytes,
    }


def sweep_cell(
    graph: TrainingGraph, budget_bytes: int, planner: str, gb_s: float, limit_s: float
) -> dict[str, Any]:
    """A plan for links of another rate."""
    other = msgspec.structs.replace(graph, links=links(gb_s))
    return plan_cell(other, budget_bytes, planner, limit_s) | {"gb_s": gb_s}


def slower_cell(
    graph: TrainingGraph, budget_bytes: int, planner: str, share: float, limit_s: float
) -> dict[str, Any]:
    """A plan for that share of the links' rate, judged on shares of the true one."""
    assert graph.links is not None
    cautious = msgspec.structs.replace(graph, links=graph.links.slower(share))
    result = planned(cautious, budget_bytes, planner, limit_s)
    cell: dict[str, Any] = {"solver": planner, "planned_share": share, "status": result.status}
    if result.schedule is None:
        return cell | {"judged": {}}
    judged = {
        str(true): judged_facts(graph, result.schedule, graph.links.slower(true)) for true in SLOWER
    }
    return cell | {"judged": judged}
