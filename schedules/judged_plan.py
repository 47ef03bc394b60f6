"""Whether a kept plan still is what the simulator says of it.

Anyone can edit a file. So what a plan says of its peak and its times is not believed: its schedule
is simulated again on the graph that it keeps. Its lower bound cannot be simulated: it is compared
with the time, and nobody takes it for proved. What trains is judged on a graph that is traced
anew, too.
"""

from __future__ import annotations

from remat.graph_capture.errors import GraphError, PlanError, ScheduleError, SignatureError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.shapes.ranges import Symbol, corner
from remat.schedules.over_range import carried
from remat.schedules.plan import AGAIN, Plan, Prediction, RangeFacts
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import gap_of, simulate
from remat.schedules.simulation import Simulation

AGREEMENT = 1e-9
"""Largest relative difference of two times that come from the same sum."""


def judge_plan(plan: Plan, name: str = "the plan") -> tuple[TrainingGraph, Simulation]:
    """The graph that a plan keeps, and what `simulate` says of its schedule now.

    Raises
    ------
    PlanError : the plan keeps no graph; or its schedule breaks a rule, or its figures are not
        those of the simulator, so it was edited or is stale; or its peak is above its budget.
    """
    if plan.graph is None:
        raise PlanError(
            f"{name} keeps no graph with prices: it was rewritten by hand, or made by an older "
            f"release. Name its model too (MODEL --plan {name}), or make it again with "
            "remat run MODEL --budget BUDGET -o FILE"
        )
    try:
        simulation = simulate(plan.graph, plan.schedule)
    except ScheduleError as error:
        raise PlanError(f"{name} was edited, or is stale: {error}. {AGAIN}") from error
    if plan.prediction is not None:
        _require_same(plan.prediction, simulation, name)
    require_within_budget(plan.schedule, simulation.peak_bytes, name)
    return plan.graph, simulation


def judge_family(over: RangeFacts, name: str = "the plan") -> None:
    """Judge each member of a kept family at the corners of what it serves.

    Raises
    ------
    PlanError : a member breaks a rule, or its peak is above the budget at a corner; or the family
        is not one of the range.
    """
    family, graph = over.family, over.graph
    top = corner(graph.symbols, "high")
    is_whole = family.symbols == graph.symbols and bool(family.members)
    if not is_whole or top not in family.top.corners:
        raise PlanError(f"{name} was edited: its schedules do not serve its range. {AGAIN}")
    try:
        for member in family.members:
            for one in member.corners:
                part = (Symbol(s.name, s.low, one[s.name], s.multiple) for s in graph.symbols)
                bounding = graph.bounding(tuple(part))
                found = simulate(bounding, carried(member.schedule, bounding))
                if found.peak_bytes > min(member.peak_bytes, family.budget_bytes):
                    raise PlanError(
                        f"{name} was edited, or is stale: at {one} its schedule has a peak of "
                        f"{found.peak_bytes} bytes, above the {member.peak_bytes} that it says "
                        f"and the budget of {family.budget_bytes}. {AGAIN}"
                    )
    except (ScheduleError, GraphError, SignatureError, KeyError) as error:
        raise PlanError(f"{name} was edited, or is stale: {error}. {AGAIN}") from error


def require_within_budget(schedule: Schedule, peak_bytes: int, name: str) -> None:
    """Raise `PlanError` if a peak of `simulate` is above the budget that a schedule names."""
    if 0 < schedule.budget_bytes < peak_bytes:
        raise PlanError(
            f"the peak of {name} is {peak_bytes} bytes on this graph, above its budget of "
            f"{schedule.budget_bytes}: it was edited, or made with the sizes of another machine. "
            f"{AGAIN}"
        )


def _require_same(said: Prediction, found: Simulation, name: str) -> None:
    bound_us = said.lower_bound_us
    pairs = (
        ("peak_bytes", said.peak_bytes, found.peak_bytes),
        ("time_us", said.time_us, found.time_us),
        ("overhead", said.overhead, found.overhead),
        ("lower_bound_us", bound_us, min(bound_us, found.time_us)),
        # Older plans have a gap of 0 where there is no bound.
        ("gap", said.gap or 0.0, gap_of(found.time_us, bound_us) or 0.0),
    )
    for figure, planned, real in pairs:
        if abs(planned - real) > AGREEMENT * max(abs(real), 1.0):
            raise PlanError(
                f"{name} was edited, or is stale: it says {figure} {planned:.10g}, and simulating "
                f"its schedule on its graph gives {real:.10g}. {AGAIN}"
            )
