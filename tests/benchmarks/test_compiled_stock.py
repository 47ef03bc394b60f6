"""A budget of 100 % is the peak of the step as torch compiles it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.compiled import stock
from benchmarks.compiled.stock import MODELS, Row, main, measured
from remat.compile.graph_context import CompiledPlan


@pytest.fixture(autouse=True)
def no_kept_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_all_of_the_budget_is_stocks_step(name: str) -> None:
    row = measured(name)
    assert row.planned_bytes <= stock.TOLERANCE * row.stock_bytes, row
    assert row.predicted_stock_bytes == pytest.approx(row.stock_bytes, rel=0.005)
    assert row.predicted_bytes == pytest.approx(row.planned_bytes, rel=0.005)
    assert row.difference < 1e-6  # an embedding's gradient is added up in any order


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_a_plan_that_writes_over_saved_values_gives_the_same_gradients(name: str) -> None:
    row = measured(name, "85%")
    assert row.planned_bytes <= row.stock_bytes
    assert row.predicted_bytes == pytest.approx(row.planned_bytes, rel=0.005)
    assert row.difference < 1e-5


@pytest.mark.parametrize(("planned", "predicted"), [(103, 103), (100, 98), (100, 100)])
def test_a_step_above_stocks_or_its_prediction_fails(
    planned: int, predicted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row("gpt", 100, 100, predicted, planned, 0.0)
    monkeypatch.setattr(stock, "measured", lambda *_: row)
    assert main(["--models", "gpt"]) == (0 if planned == predicted == 100 else 1)


def test_the_line_of_a_plan_says_where_torch_alone_fits() -> None:
    for budget_bytes, is_said in ((100, True), (99, False)):
        plan = CompiledPlan("0/0", budget_bytes, 90, 100, 0, 0, 0.0, 0.0, 0, 1, 0.0)
        assert ("which fits without a plan" in repr(plan)) == is_said
