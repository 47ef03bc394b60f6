"""`auto` against templates, policies and chain algorithms, on networks at several budgets."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest

from remat.graph_capture.graph import TrainingGraph
from remat.solver import Result, solve_within
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S, solved_in_rounds
from tests.solver.checks import ON_THE_DEVICE, check
from tests.solver.graphs.random_graphs import gpt_like, resnet_like, unet_like

GAP = 0.01
ROUNDS = 3
"""After which a search that has not closed its gap is ended."""
SLACK = 1 + 1e-9
SEARCHES = (
    "auto", "cut", "hierarchical", "checkmate", "retention", "lower_set", "lp_rounding",
    "exhaustive", "joint",
)  # fmt: skip
"""Solvers that search; all others are templates, policies and algorithms for chains."""
BASELINES = [name for name in ON_THE_DEVICE if name not in SEARCHES]
NETWORKS = {
    "gpt": functools.partial(gpt_like, 1),
    "resnet": functools.partial(resnet_like, 2),
    "unet": functools.partial(unet_like, 1),
}


@functools.cache
def network(name: str) -> TrainingGraph:
    return NETWORKS[name]()


@functools.cache
def auto_of(name: str, percent: int) -> Result:
    graph = network(name)
    budget_bytes = peak_bytes_of(graph) * percent // 100
    return solved_in_rounds(graph, budget_bytes, ROUNDS, gap=GAP)


@pytest.mark.parametrize("name", NETWORKS)
def test_more_memory_never_makes_auto_slower_than_the_gap_on_networks(name: str) -> None:
    results = [auto_of(name, percent) for percent in (57, 70, 85, 100)]
    fitting = [result for result in results if result.schedule is not None]
    assert fitting == results[-len(fitting) :], "a larger budget is called too small"
    assert len(fitting) >= 2
    for tight, loose in pairwise(fitting):
        assert loose.time_us <= tight.time_us * (1 + max(GAP, loose.gap))
        assert loose.lower_bound_us <= tight.time_us * SLACK


def check_nothing_beats(best: Result, graph: TrainingGraph, solvers: list[str]) -> None:
    """No solver of these has a schedule where `best` has none, or one faster than its gap."""
    for solver in solvers:
        other = solve_within(graph, best.budget_bytes, solver, time_limit_s=AMPLE_S)
        if other.schedule is not None:
            assert best.schedule is not None, f"{solver} fits {best.budget_bytes} bytes"
            assert best.time_us <= other.time_us * (1 + GAP), solver


@pytest.mark.parametrize("percent", [85, 70, 57])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_baseline_beats_auto_on_networks(name: str, percent: int) -> None:
    check_nothing_beats(auto_of(name, percent), network(name), BASELINES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_auto_has_a_schedule_where_any_policy_has_one(name: str) -> None:
    graph = network(name)
    lost = [solve_within(graph, 0, solver) for solver in BASELINES]
    least_bytes = min(result.least_feasible_bytes for result in lost)
    best = solved_in_rounds(graph, least_bytes, ROUNDS, gap=GAP)
    check_nothing_beats(best, graph, BASELINES)
    assert best.schedule is not None


@functools.cache
def traced(name: str) -> TrainingGraph:
    """A small network as captured, with the costs of a stated machine."""
    from benchmarks.networks.catalogue import gpt, resnet, unet
    from benchmarks.networks.roofline import roofline
    from remat.graph_capture.tracing.trace import trace

    networks = {
        "gpt": lambda: gpt(1, 64, seq=64, batch=8, vocab=64),
        "resnet": lambda: resnet((1, 1), bottleneck=False, batch=16, image=64),
        "unet": lambda: unet(4, 2, batch=2, image=16),
    }
    return roofline(trace(**networks[name]()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "resnet", "unet"])
def test_no_baseline_beats_auto_on_traced_networks(name: str) -> None:
    graph = traced(name)
    budget_bytes = peak_bytes_of(graph) * 75 // 100
    best = solved_in_rounds(graph, budget_bytes, ROUNDS, gap=GAP)
    assert best.schedule is not None
    assert best.overhead > 0
    check(graph, best, budget_bytes)
    check_nothing_beats(best, graph, [*BASELINES, "cut", "hierarchical"])
