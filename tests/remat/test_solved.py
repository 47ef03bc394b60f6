"""What is said where there is no schedule: too small, or out of time."""

from __future__ import annotations

import pytest

from remat.solved import infeasible_text
from remat.solver import Result, make_solver, solve_within
from remat.solver.result import with_time_limit_message
from tests.rows import rows
from tests.solver.checks import ON_THE_DEVICE
from tests.solver.graphs.random_graphs import gpt_like

NO_CLOCK = (
    "chen_sqrt", "store_all", "full", "every_n_layers", "selective", "keep_attention_output",
    "norms_and_activations", "exhaustive",
)  # fmt: skip
"""Solvers that are done before they look at the clock, and the one that refuses the graph."""
LIMIT = "the time limit of 0 s ended the search: allow a longer one (time_limit_s=)"


@pytest.mark.parametrize(
    ("solver", "pins"),
    rows(
        [
            *((name, {}) for name in ON_THE_DEVICE if name not in NO_CLOCK),
            *((name, {"recompute": "*"}) for name in ("auto", "cut", "retention", "dtr", "rotor")),
        ],
        lambda row: row[0] != "checkmate",
    ),
)
def test_out_of_time_is_not_said_to_be_too_small(solver: str, pins: dict[str, str]) -> None:
    graph = gpt_like(2)
    budget_bytes = solve_within(graph, 1 << 60, "store_all").peak_bytes * 6 // 10
    result = solve_within(graph, budget_bytes, solver, time_limit_s=0, **pins)
    if result.schedule is not None:
        return
    assert result.status == "time limit"
    assert result.message.startswith(LIMIT)
    text = infeasible_text(result)
    assert text.startswith(f"no schedule within 117.7 MiB was found yet: {LIMIT}")
    assert "budget 117.7 MiB is below" not in text
    assert "a smaller batch" not in text


def test_a_free_order_names_the_whole_limit() -> None:
    graph = gpt_like(2)
    result = solve_within(graph, 1 << 26, order="free", time_limit_s=0)
    assert result.status == "time limit"
    assert result.message.startswith(LIMIT)


@pytest.mark.parametrize("said", ["", "No schedule has a peak below 3 bytes"])
def test_the_limit_of_a_part_is_not_named(said: str) -> None:
    lost = Result("time limit", "auto", 1 << 20, message=said)
    part = with_time_limit_message(lost, 0.8)
    assert "0.8 s" in part.message
    assert with_time_limit_message(part, 60.0) == with_time_limit_message(lost, 60.0)
    assert with_time_limit_message(lost, 60.0).message.endswith(said or "time_limit_s=)")


def test_what_is_too_small_is_still_said_to_be() -> None:
    graph = gpt_like(1)
    text = infeasible_text(solve_within(graph, 1 << 20, "cut"))
    assert ": budget 1.00 MiB is below" in text


def test_a_solver_that_is_asked_directly_does_not_ask_for_a_larger_budget() -> None:
    graph = gpt_like(2)
    result = make_solver("cut", time_limit_s=0).solve(graph, 117 << 20)
    assert "allow a longer time limit" in infeasible_text(result)
