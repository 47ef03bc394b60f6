"""Bases for tests: states in which some ops are hosted, brought under a budget by repair."""

from __future__ import annotations

import random
from typing import NamedTuple

import msgspec

from remat.graph_capture.graph import Link, Links, TrainingGraph
from remat.solver.local_search.repair import Repair
from remat.solver.offload.fetch_as_recompute import UntimedSchedule, untimed_schedule, with_fetches
from remat.solver.problem import Problem
from remat.solver.search import Search
from remat.solver.state import store_all_state
from tests.graphs import peak_bytes_of
from tests.links import with_links
from tests.solver.graphs.random_graphs import random_graph


class HostedCase(NamedTuple):
    """A graph with links, and a base of it whose peak is within the budget."""

    graph: TrainingGraph
    links: Links
    base: UntimedSchedule
    budget_bytes: int


def hosted_base(
    graph: TrainingGraph, links: Links, hosted: set[int], budget_bytes: int
) -> UntimedSchedule | None:
    """What repair makes of the step that keeps everything, with `hosted` ops; None if it fails."""
    problem = with_fetches(Problem.of(graph), hosted, links)
    state = store_all_state(problem)
    search = Search(graph, budget_bytes, "a test", 600.0)
    return (
        untimed_schedule(state, hosted) if Repair(state, budget_bytes, 1.0, search).run() else None
    )


def random_case(seed: int) -> HostedCase | None:
    """One at random; None where the budget cannot be met."""
    source = random.Random(seed)
    n_ops = source.randint(4, 16)
    graph = random_graph(source, n_ops, source.randint(1, n_ops))
    d2h, h2d = (Link(source.choice((0.2, 1.0, 8.0)), source.choice((0.0, 1.0))) for _ in range(2))
    nvme = Link(source.choice((0.2, 1.0)), source.choice((0.0, 1.0)))
    links = Links(d2h, h2d, 1 << 40, nvme, nvme, 1 << 40)
    graph = with_links(graph, links)
    hosted = {op for op in range(n_ops) if source.random() < 0.6}
    budget_bytes = int(peak_bytes_of(graph) * source.uniform(0.4, 1.0))
    base = hosted_base(graph, links, hosted, budget_bytes)
    return None if base is None else HostedCase(graph, links, base, budget_bytes)


def many_cases(count: int) -> list[HostedCase]:
    """So many of them in which values leave."""
    found: list[HostedCase] = []
    seed = 0
    while len(found) < count:
        case = random_case(seed)
        seed += 1
        if case is not None and case.base.off_spans:
            found.append(case)
    return found


def with_host_bytes(links: Links, host_bytes: int, nvme_bytes: int = 1 << 40) -> Links:
    """`links` with so much room below the device."""
    return msgspec.structs.replace(links, host_bytes=host_bytes, nvme_bytes=nvme_bytes)
