"""Every row of the table on random graphs: judged, and its bounds against all schedules."""

from __future__ import annotations

import functools
from itertools import pairwise, product
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings

from remat.graph_capture.graph import TrainingGraph
from remat.schedules.schedule import Compute, Schedule
from remat.solver import Result, option_names, solve_within
from remat.solver.budgets.sweep import spread_budgets, sweep_budgets
from remat.solver.problem import Problem
from tests.graphs import peak_bytes_of
from tests.limits import AMPLE_S
from tests.solver.checks import IGNORES_BUDGET, ON_THE_DEVICE, check, check_front
from tests.solver.exhaustive import least_time_us
from tests.solver.graphs.captured_order import keeps_order
from tests.solver.graphs.random_graphs import chain, training_graphs
from tests.solver.graphs.tight_cases import TightCase, tight_cases

SLACK = 1 + 1e-9
PROOF = "no schedule fits"
"""How a message begins that claims a proof."""


class Variant(NamedTuple):
    """A solver, in captured order or, where it can, in any."""

    solver: str
    order: str = "fixed"


FREE = [Variant(name, "free") for name in ON_THE_DEVICE if "order" in option_names(name)]
VARIANTS = [*(Variant(name) for name in ON_THE_DEVICE), *FREE]


def solved(variant: Variant, graph: TrainingGraph, budget_bytes: int) -> Result:
    options: dict[str, Any] = {"order": "free"} if variant.order == "free" else {}
    return solve_within(graph, budget_bytes, variant.solver, time_limit_s=AMPLE_S, **options)


def cases() -> tuple[TightCase, ...]:
    return tight_cases(10, 800)


@functools.cache
def results_of(variant: Variant) -> tuple[Result, ...]:
    return tuple(solved(variant, case.graph, case.budget_bytes) for case in cases())


def in_captured_order(graph: TrainingGraph, schedule: Schedule) -> bool:
    ops = [graph.op_index[step.op] for step in schedule.steps if isinstance(step, Compute)]
    return keeps_order(Problem.of(graph), ops)


def check_bounds(graph: TrainingGraph, found: dict[Variant, Result]) -> None:
    """No schedule is faster than a bound that holds for its order, or known not to exist."""
    kept = {
        variant: result.schedule is not None and in_captured_order(graph, result.schedule)
        for variant, result in found.items()
    }
    for (maker, made), (prover, proved) in product(found.items(), repeat=2):
        if made.schedule is None or not (kept[maker] or prover.order == "free"):
            continue
        assert proved.lower_bound_us <= made.time_us * SLACK, (maker, prover)
        assert not proved.message.startswith(PROOF), (maker, prover)
        assert proved.status != "infeasible", (maker, prover)
        if proved.status == "optimal" and prover.order == "free":
            assert proved.time_us <= made.time_us * SLACK, (maker, prover)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: " ".join(variant))
def test_results_on_random_graphs_are_as_the_judge_says(variant: Variant) -> None:
    for case, result in zip(cases(), results_of(variant), strict=True):
        check(case.graph, result, case.budget_bytes)
        if result.schedule is not None:
            assert result.schedule.solver == variant.solver
            is_kept = in_captured_order(case.graph, result.schedule)
            assert is_kept or variant.order == "free"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: " ".join(variant))
def test_claims_on_random_graphs_are_true(variant: Variant) -> None:
    """Bounds, optima and proofs against exhaustive search; a free order may be faster."""
    for case, result in zip(cases(), results_of(variant), strict=True):
        if case.optimum_us is None:
            assert result.schedule is None or variant.order == "free"
            continue
        assert not result.message.startswith(PROOF)
        assert result.status != "infeasible"
        assert result.lower_bound_us <= case.optimum_us * SLACK
        if result.status == "optimal":
            assert result.time_us <= case.optimum_us * SLACK
        if result.schedule is not None and variant.order == "fixed":
            assert result.time_us * SLACK >= case.optimum_us


def test_no_solver_is_faster_than_any_bound_on_tight_cases() -> None:
    for i, case in enumerate(cases()):
        check_bounds(case.graph, {variant: results_of(variant)[i] for variant in VARIANTS})


@settings(max_examples=8, deadline=None)
@given(training_graphs(max_ops=12))
def test_no_solver_is_faster_than_any_bound_on_larger_graphs(graph: TrainingGraph) -> None:
    budget_bytes = peak_bytes_of(graph) - 1
    found = {variant: solved(variant, graph, budget_bytes) for variant in VARIANTS}
    for result in found.values():
        check(graph, result, budget_bytes)
    check_bounds(graph, found)


@pytest.mark.parametrize("variant", FREE, ids=lambda variant: " ".join(variant))
def test_a_free_order_is_never_worse(variant: Variant) -> None:
    faster = 0
    pairs = zip(results_of(Variant(variant.solver)), results_of(variant), strict=True)
    for fixed, free in pairs:
        if fixed.schedule is None:
            faster += free.schedule is not None
            continue
        assert free.schedule is not None
        assert free.time_us <= fixed.time_us * SLACK
        faster += free.time_us * SLACK < fixed.time_us
    assert faster, "the cases have none in which another order helps"


@pytest.mark.parametrize("seed", [1, 3])
def test_auto_finds_the_optimum_of_small_graphs_and_proves_it(seed: int) -> None:
    """These are a matter of milliseconds for `exhaustive`."""
    for graph, budget_bytes, optimum_us in tight_cases(23, seed):
        result = solved(Variant("auto"), graph, budget_bytes)
        assert result.status == ("infeasible" if optimum_us is None else "optimal")
        assert (None if result.schedule is None else result.time_us) == optimum_us


@pytest.mark.parametrize("solver", [name for name in ON_THE_DEVICE if name != "auto"])
def test_nothing_beats_auto_on_small_graphs(solver: str) -> None:
    for best, other in zip(results_of(Variant("auto")), results_of(Variant(solver)), strict=True):
        if other.schedule is not None:
            assert best.schedule is not None
            assert best.time_us <= other.time_us * SLACK


@functools.cache
def budgets_of_chain() -> list[int]:
    return spread_budgets(chain(5), 4)[0]


@pytest.mark.parametrize("solver", ON_THE_DEVICE)
def test_every_front_is_monotone(solver: str) -> None:
    graph = chain(5)
    front = sweep_budgets(graph, budgets_of_chain(), solver, time_limit_s=AMPLE_S)
    check_front(graph, front)
    if solver not in IGNORES_BUDGET:
        assert front.points[-1].result.overhead == 0


def test_more_memory_never_makes_auto_slower_on_small_graphs() -> None:
    for graph, budget_bytes, optimum_us in tight_cases(4, 801):
        if optimum_us is not None:
            continue
        budgets = range(budget_bytes, peak_bytes_of(graph) + 1)
        results = [solved(Variant("auto"), graph, budget) for budget in budgets]
        assert results[0].schedule is None
        assert results[-1].overhead == 0
        for tight, loose in pairwise(results[1:]):
            assert tight.schedule is not None
            assert loose.time_us <= tight.time_us
            assert loose.lower_bound_us <= tight.lower_bound_us * SLACK
            assert loose.time_us == least_time_us(graph, loose.budget_bytes)
