"""Without copies, time is the sum of costs to the bit, and nothing waits: for any solver."""

from __future__ import annotations

import functools
import random

import msgspec
import pytest

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Schedule
from remat.schedules.simulate import Simulation, simulate
from remat.solver import option_names, solve_within
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.links import with_links
from tests.rows import rows
from tests.solver.checks import ON_THE_DEVICE
from tests.solver.graphs.random_graphs import chain, gpt_like, random_graph

GAP = 0.02
LARGE = ("lp_rounding", "checkmate", "exhaustive")
"""Solvers of large programs, and the one that takes a few ops only: on the random graph alone."""
OFTEN = ("cut", "dtr", "revolve", "chen_sqrt")
"""Solvers that a quick run has on all graphs."""
GRAPHS = {
    "chain": lambda: chain(8),
    "gpt": lambda: gpt_like(1),
    "random": lambda: random_graph(random.Random(4), 9, 5),
}


@functools.cache
def graph_of(name: str) -> TrainingGraph:
    """Costs that no float holds exactly: sums of them differ by their order."""
    graph, source = GRAPHS[name](), random.Random(7)
    ops = tuple(msgspec.structs.replace(op, cost_us=source.uniform(0.1, 90)) for op in graph.ops)
    return msgspec.structs.replace(graph, ops=ops)


def check_as_a_sum(graph: TrainingGraph, schedule: Schedule) -> Simulation:
    cost = {op.name: op.cost_us for op in graph.ops}
    found = simulate(graph, schedule)
    time_us, clock_us = 0.0, list[float]()
    for step in schedule.steps:
        time_us += cost[step.op] if isinstance(step, Compute) else 0.0
        clock_us.append(time_us)
    assert found.time_us == time_us
    assert found.clock_us == tuple(clock_us)
    assert (found.stalls, found.stall_us) == ((), 0)
    assert not any(found.moved_bytes.values())
    assert (found.host_peak_bytes, found.nvme_peak_bytes) == (0, 0)
    return found


@pytest.mark.parametrize(
    ("solver", "name"),
    rows(
        (
            (solver, name)
            for solver in ON_THE_DEVICE
            for name in GRAPHS
            if name == "random" or solver not in LARGE
        ),
        lambda row: row[0] in OFTEN or (row[0] not in LARGE and row[1] == "random"),
    ),
)
def test_a_schedule_without_copies_takes_the_sum_of_its_costs(solver: str, name: str) -> None:
    graph = graph_of(name)
    options = {"gap": GAP} if "gap" in option_names(solver) else {}
    for percent in (100, 85, 70):
        budget_bytes = peak_bytes_of(graph) * percent // 100
        result = solve_within(graph, budget_bytes, solver, time_limit_s=AMPLE_S, **options)
        schedule = result.schedule or result.least_schedule
        if schedule is not None:
            found = check_as_a_sum(graph, schedule)
            assert check_as_a_sum(with_links(graph), schedule) == found
