"""Random small graphs at every budget at which they must recompute, with the optimum."""

from __future__ import annotations

import functools
import random
from typing import NamedTuple

from remat.graph_capture.graph import TrainingGraph
from tests.graphs import peak_bytes_of
from tests.solver.exhaustive import least_time_us
from tests.solver.graphs.random_graphs import random_graph

UNLIMITED_BYTES = 1 << 60


class TightCase(NamedTuple):
    """`optimum_us` is the least time in captured order, None where no schedule fits."""

    graph: TrainingGraph
    budget_bytes: int
    optimum_us: float | None


@functools.cache
def tight_cases(count: int, seed: int = 0, max_ops: int = 8) -> tuple[TightCase, ...]:
    """Cases of `count` graphs that can go below the peak of the step that keeps everything.

    For each optimum the tightest budget that allows it, and the largest that allows nothing.
    """
    source = random.Random(seed)
    cases: list[TightCase] = []
    found = 0
    while found < count:
        n_ops = source.randint(4, max_ops)
        of_graph = _below_the_peak(random_graph(source, n_ops, source.randint(0, n_ops)))
        if len(of_graph) > 1:
            found += 1
            cases += of_graph
    return tuple(cases)


def _below_the_peak(graph: TrainingGraph) -> list[TightCase]:
    cases: list[TightCase] = []
    for budget_bytes in range(peak_bytes_of(graph) - 1, -1, -1):
        case = TightCase(graph, budget_bytes, least_time_us(graph, budget_bytes))
        if cases and case.optimum_us == cases[-1].optimum_us:
            cases.pop()
        cases.append(case)
        if case.optimum_us is None:
            break
    return cases
