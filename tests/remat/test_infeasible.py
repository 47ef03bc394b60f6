"""What is said when no schedule fits: too small a budget is told apart from too little time."""

from __future__ import annotations

import msgspec
import pytest

import remat
from remat.infeasible import infeasible_text
from remat.solver.result import INTERRUPTED
from tests.solver.random_graphs import gpt_like


@pytest.mark.parametrize("solver", ["auto", "cut", "msps", "hierarchical"])
def test_out_of_time_asks_for_a_longer_limit(solver: str) -> None:
    result = remat.solve(gpt_like(2), "60%", solver, time_limit_s=0.0)
    assert (result.status, result.schedule) == ("time limit", None)
    said = infeasible_text(result)
    assert "was found before the time limit, after " in said
    assert "Give a longer --time-limit (time_limit_s)" in said
    assert "is below" not in said


def test_too_small_a_budget_is_said_to_be_too_small() -> None:
    result = remat.solve(gpt_like(2), "1KiB", "msps")
    assert result.status == "infeasible"
    assert "budget 1.0 KiB is below" in infeasible_text(result)
    assert "time" not in infeasible_text(result)


def test_an_interrupted_search_says_so() -> None:
    result = remat.solve(gpt_like(2), "60%", "cut", time_limit_s=0.0)
    stopped = msgspec.structs.replace(result, message=f"{INTERRUPTED} by hand")
    assert "longer" not in infeasible_text(stopped)
    assert "interrupted by hand" in infeasible_text(stopped)
