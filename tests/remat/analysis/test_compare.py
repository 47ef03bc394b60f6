"""Comparisons: each cell is what a solve finds, and the bound is below all of them."""

from __future__ import annotations

import functools

import pytest

import remat
from remat.analysis.compare import THIS_PLAN, UNMODIFIED, Sweep
from remat.graph_capture.errors import BudgetError, SolverError
from remat.schedules.outcome import Result
from remat.solver import solve_within
from tests.limits import AMPLE_S
from tests.solver.graphs.traced_gpt import costed_gpt

SOLVERS = ("cut", "msps", "full", "exhaustive")
BUDGETS = ("120%", "85%", "75%")


@functools.cache
def plan() -> Result:
    return remat.solve(costed_gpt(), "75%", solver="cut", time_limit_s=AMPLE_S)


@functools.cache
def compared() -> Sweep:
    return remat.sweep(costed_gpt(), BUDGETS, SOLVERS, plan=plan(), time_limit_s=AMPLE_S)


def test_budgets_are_columns_and_solvers_and_baselines_rows() -> None:
    found = compared()
    assert [row.solver for row in found.rows] == [UNMODIFIED, THIS_PLAN, *SOLVERS]
    assert found.asked == ("120%", "85%", THIS_PLAN)
    sizes = [bound.budget_bytes for bound in found.bounds]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] == plan().budget_bytes
    unmodified = found.rows[0]
    assert [cell.fits for cell in unmodified.cells] == [True, False, False]
    assert unmodified.cells[0].peak_bytes == found.unmodified_bytes


def test_each_figure_is_one_of_a_real_solve() -> None:
    found = compared()
    by_name = {row.solver: row for row in found.rows}
    alone = solve_within(costed_gpt(), found.bounds[1].budget_bytes, "msps")
    assert by_name["msps"].cells[1].time_us == alone.time_us
    assert by_name["msps"].cells[1].peak_bytes == alone.peak_bytes
    assert by_name[THIS_PLAN].cells[2].time_us == plan().time_us


def test_the_bound_is_below_every_plan_and_the_best_is_marked() -> None:
    found = compared()
    for i, bound in enumerate(found.bounds):
        times = [row.cells[i].time_us for row in found.rows if row.cells and row.cells[i].fits]
        assert bound.lower_bound_us <= min(times) * (1 + 1e-9)
        for name in found.best(i):
            row = next(row for row in found.rows if row.solver == name)
            assert row.cells[i].time_us == pytest.approx(min(times))
    assert found.bounds[2].lower_bound_us >= plan().lower_bound_us
    assert found.bounds[2].solver in ("cut", THIS_PLAN)


def test_a_solver_that_does_not_take_the_graph_says_so_in_its_row() -> None:
    (row,) = [row for row in compared().rows if row.solver == "exhaustive"]
    assert row.cells == ()
    assert "exhaustive search takes at most" in row.refused
    assert "exhaustive: use solver auto" in str(compared())


def test_what_is_unknown_is_refused_first() -> None:
    with pytest.raises(SolverError, match="unknown solver 'cutt': did you mean cut"):
        remat.sweep(costed_gpt(), solvers=["cutt"])
    with pytest.raises(BudgetError, match="unknown unit 'gigs'"):
        remat.sweep(costed_gpt(), ["8 gigs"], ["full"])


def test_a_number_of_budgets_is_spread_over_them() -> None:
    found = remat.sweep(costed_gpt(), 3, ["full"], time_limit_s=AMPLE_S)
    assert len(found.bounds) == 3
    assert found.as_json()["best"]


def test_a_bound_in_captured_order_is_not_said_of_free_orders() -> None:
    found = remat.sweep(
        costed_gpt(), ["75%"], ["exhaustive"], plan=plan(), time_limit_s=10, order="free"
    )
    assert plan().lower_bound_us > found.base_us
    assert [bound.solver for bound in found.bounds] == [""] * len(found.bounds)


def test_each_solve_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    remat.sweep(
        costed_gpt(), ["70%", "80%"], ("chen_sqrt", "full"),
        progress=lambda name, done, total: told.append((name, done, total)),
    )  # fmt: skip
    assert list(dict.fromkeys(told)) == [
        ("chen_sqrt", 0, 4), ("chen_sqrt", 1, 4), ("full", 2, 4), ("full", 3, 4)
    ]  # fmt: skip
