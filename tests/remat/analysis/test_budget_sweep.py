"""Sweeps say the same of the unmodified step as budgets and comparisons do."""

from __future__ import annotations

import remat
from remat.budgets import parse_budget
from remat.solver import solve_within
from tests.solver.graphs.traced_gpt import traced_gpt


def test_the_unmodified_peak_is_the_one_that_per_cents_are_of() -> None:
    """Of a model with dropout, whose masks are larger in eager than in any plan."""
    graph = traced_gpt("written out")
    found = remat.sweep(graph, 2, "chen_sqrt", time_limit_s=4.0)
    listed = remat.sweep(graph, ["100%", "80%"], "chen_sqrt", time_limit_s=4.0)
    whole_bytes = parse_budget("100%").bytes_for(graph)
    assert whole_bytes > solve_within(graph, 1 << 60, "store_all").peak_bytes
    assert found.unmodified_bytes == listed.unmodified_bytes == whole_bytes
    assert [list(one)[-1].budget_bytes for one in (found, listed)] == [whole_bytes] * 2
