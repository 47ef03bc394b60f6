"""The climb over hosted sets: what it reads of a schedule, and what it makes of one."""

from __future__ import annotations

from remat.graph_capture.graph import Link, Links
from remat.schedules.schedule import Compute, Fetch, Free, Offload, Schedule
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.offload.joint import arrivals_and_runs, climb_hosted, hosted_ops
from remat.solver.problem import Problem
from remat.solver.search import Search
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.links import links, with_links
from tests.solver.graphs.random_graphs import chain, gpt_like


def test_a_fetch_counts_where_its_value_is_first_read() -> None:
    graph = with_links(chain(3))
    names = [op.name for op in graph.ops]
    first, second = names[0], names[1]
    steps = [Compute(first), Offload(first), Compute(second), Free(first), Free(second)]
    steps += [Fetch(first), Compute(second), *(Compute(name) for name in names[2:])]
    schedule = Schedule.for_graph(graph, steps)
    assert simulate(graph, schedule).moved_bytes["d2h"] > 0
    runs = arrivals_and_runs(Problem.of(graph), schedule)
    assert runs == [[], [], [0, 1], *([] for _ in names[2:])]


def test_a_climb_betters_a_schedule_that_copies_nothing() -> None:
    plain = gpt_like(1)
    budget_bytes = peak_bytes_of(plain) * 60 // 100
    alone = solve_within(plain, budget_bytes, "cut", gap=0.05, time_limit_s=AMPLE_S)
    assert alone.schedule is not None
    found = links(50.0)
    search = Search(with_links(plain, found), budget_bytes, "joint", AMPLE_S)
    search.offer_schedule(alone.schedule)
    climb_hosted(search, found, 0.05)
    result = search.result()
    assert result.schedule is not None
    assert hosted_ops(search)
    assert result.time_us < alone.time_us
    assert result.peak_bytes <= budget_bytes


def test_a_climb_ends_at_a_link_too_slow_to_help() -> None:
    plain = chain(5)
    budget_bytes = peak_bytes_of(plain) * 80 // 100
    alone = solve_within(plain, budget_bytes, "cut", time_limit_s=AMPLE_S)
    slow = Links(Link(1e-3), Link(1e-3), 1 << 40)
    search = Search(with_links(plain, slow), budget_bytes, "joint", AMPLE_S)
    assert alone.schedule is not None
    search.offer_schedule(alone.schedule)
    climb_hosted(search, slow, 0.0)
    assert search.result().time_us == alone.time_us
