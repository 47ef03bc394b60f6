"""What a run advises: no plan where none is needed, and new costs where they are far off."""

from __future__ import annotations

import pytest

from remat.budgets import unmodified
from remat.job.pipeline import Report, Row, rows_as_run
from remat.job.screen import advice_on_run
from remat.rewriter.checking.check import Check
from remat.solver import solve_within
from tests.solver.graphs.random_graphs import chain

GRAPH = chain(4)
PEAK_BYTES = unmodified(GRAPH).peak_bytes


def advised(budget_bytes: int, *ratios: float | None, overhead: float | None = None) -> str:
    rows = tuple(
        Row(
            name,
            PEAK_BYTES,
            100.0,
            0.0,
            measured_overhead=overhead,
            measured_step_us=None if by is None else 100.0 * by,
        )
        for name, by in zip(("unmodified", "chen_sqrt", "this plan"), ratios, strict=True)
    )
    result = solve_within(GRAPH, budget_bytes, "store_all")
    return " ".join(advice_on_run(Report(GRAPH, result, rows, {}, (), None)))


def test_a_step_that_fits_already_needs_no_plan() -> None:
    assert "train without a plan: the unmodified step" in advised(PEAK_BYTES, None, None, None)
    assert advised(PEAK_BYTES - 1, None, None, None) == ""


@pytest.mark.parametrize("ratios", [(1.6, 1.5, 1.4), (None, None, 1.4), (0.5, 0.6, 0.7)])
def test_steps_that_are_all_far_from_predicted_are_told(ratios: tuple[float | None, ...]) -> None:
    worst = max(r for r in ratios if r) if ratios[-1] and ratios[-1] > 1 else 0.5
    text = advised(PEAK_BYTES - 1, *ratios)
    assert f"took {worst:.2f} times as long as predicted" in text
    assert "--measure-again" in text


def test_one_slow_step_among_others_says_nothing() -> None:
    assert advised(PEAK_BYTES - 1, 1.0, 1.9, 1.1) == ""


@pytest.mark.parametrize("measured", [0.2, -0.15])
def test_an_overhead_that_the_clock_sees_otherwise_is_told(measured: float) -> None:
    text = advised(PEAK_BYTES - 1, 1.0, 1.1, 1.1, overhead=measured)
    assert "overhead where costs say 0.0 %" in text
    assert "quiet machine" in text
    assert advised(PEAK_BYTES - 1, 1.0, 1.1, 1.1, overhead=0.05) == ""
    assert "quiet machine" not in advised(PEAK_BYTES - 1, None, None, None)


def test_measured_steps_and_overheads_of_all_rows_say_the_same() -> None:
    slow, fast = (
        Check(True, True, True, True, 1, 1, 9, 8, base_us, plan_us)
        for base_us, plan_us in ((200.0, 300.0), (100.0, 110.0))
    )
    rows = [Row(name, PEAK_BYTES, 100.0, 0.0) for name in ("unmodified", "chen_sqrt", "this plan")]
    base, chen, plan = rows_as_run(rows, fast, slow)
    assert base.measured_step_us == 100.0
    for row, overhead in ((chen, 0.5), (plan, 0.1)):
        assert row.measured_overhead == pytest.approx(overhead)
        assert row.measured_step_us == pytest.approx(100.0 * (1 + overhead))
