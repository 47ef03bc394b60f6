"""What simple rules add to a search that has no schedule."""

from __future__ import annotations

import msgspec
import pytest

from remat.schedules.simulate import simulate
from remat.solver import Result, make_solver, solve_within
from remat.solver.reductions.other_answers import SIMPLE_RULES, simple_rule_fallback
from remat.solver.result import at_least_budget, least_budget_message
from tests.limits import AMPLE_S
from tests.solver.graphs.random_graphs import gpt_like

GRAPH = gpt_like(3)


def lost(budget_bytes: int, least_bytes: int = 1 << 60) -> Result:
    """Of a search that knows a schedule of such a peak, and proves nothing."""
    text = least_budget_message(budget_bytes, least_bytes, "Ask for more", is_proved=False)
    return Result(
        "infeasible", "auto", budget_bytes, least_feasible_bytes=least_bytes, message=text
    )


def test_the_least_that_is_named_is_no_higher_than_what_a_rule_needs() -> None:
    found = simple_rule_fallback(GRAPH, 0, lost(0), AMPLE_S)
    alone = [make_solver(name).solve(GRAPH, 0) for name in SIMPLE_RULES]
    assert found.least_feasible_bytes == min(one.least_feasible_bytes for one in alone)
    assert found.message == least_budget_message(
        0, found.least_feasible_bytes, "Ask for more", is_proved=False
    )
    at_hand = at_least_budget(GRAPH, found)
    assert at_hand is not None
    assert at_hand.schedule is not None
    assert simulate(GRAPH, at_hand.schedule).peak_bytes == found.least_feasible_bytes


def test_a_lower_peak_that_the_search_knows_stays() -> None:
    assert simple_rule_fallback(GRAPH, 0, lost(0, 1), AMPLE_S) == lost(0, 1)


def test_a_rule_that_fits_is_a_plan_of_the_solver_and_proves_nothing() -> None:
    budget_bytes = make_solver("chen_sqrt").solve(GRAPH, 0).least_feasible_bytes
    found = simple_rule_fallback(GRAPH, budget_bytes, lost(budget_bytes), AMPLE_S)
    assert found.schedule is not None
    assert found.peak_bytes <= budget_bytes
    assert (found.solver, found.status) == ("auto", "feasible")
    assert found.lower_bound_us == GRAPH.time_us
    assert "this one follows a simple rule" in found.message


@pytest.mark.parametrize("solver", ["auto", "cut"])
def test_the_least_budget_is_no_higher_than_square_root_checkpointing(solver: str) -> None:
    chen = make_solver("chen_sqrt").solve(GRAPH, 0)
    named = solve_within(GRAPH, 0, solver, time_limit_s=AMPLE_S)
    assert 0 < named.least_feasible_bytes <= chen.least_feasible_bytes
    proved = msgspec.structs.replace(named, least_bound_bytes=named.least_feasible_bytes)
    assert simple_rule_fallback(GRAPH, 0, proved, AMPLE_S) is proved
