"""The slider over budgets, without a notebook's front end."""

from __future__ import annotations

import builtins
import html
from typing import Any

import pytest

import remat
from remat.analysis.budget_sweep import BudgetSlider
from remat.formats import bytes_text, percent_text
from remat.graph_capture.errors import SolverError
from remat.schedules.simulate import simulate
from tests.limits import AMPLE_S
from tests.solver.graphs.random_graphs import chain


@pytest.fixture(scope="module")
def slider() -> BudgetSlider:
    return BudgetSlider(chain(12), time_limit_s=AMPLE_S)


def test_each_budget_is_what_solve_finds(slider: BudgetSlider) -> None:
    result, found = slider.at(70), remat.solve(slider.graph, "70%", time_limit_s=AMPLE_S)
    assert result.schedule == found.schedule
    assert result.schedule is not None
    judged = simulate(slider.graph, result.schedule)
    text = slider.text(70)
    assert f"peak        {bytes_text(judged.peak_bytes)}" in text
    assert f"overhead    {percent_text(judged.overhead)}" in text


def test_moving_the_slider_solves_again(slider: BudgetSlider) -> None:
    box = slider.widget(100)
    control, said = box.children
    before = said.value
    control.value = slider.least_percent
    assert said.value != before
    assert slider.text(slider.least_percent) in html.unescape(said.value)
    assert "<svg" in said.value


def test_it_begins_at_the_least_budget_known(slider: BudgetSlider) -> None:
    control, _ = slider.widget(1).children
    assert control.min == control.value == slider.least_percent
    found = slider.at(slider.least_percent)
    assert found.schedule is not None
    assert simulate(slider.graph, found.schedule).peak_bytes <= found.budget_bytes


def test_below_it_says_why_nothing_fits(slider: BudgetSlider) -> None:
    assert "status      infeasible: no schedule" in slider.text(1)
    assert slider.picture(1) == ""


def test_an_unknown_solver_is_named_at_once() -> None:
    with pytest.raises(SolverError, match="unknown solver 'cutt': did you mean cut"):
        BudgetSlider(chain(4), solver="cutt")


def test_without_ipywidgets_it_says_what_to_install(
    slider: BudgetSlider, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "ipywidgets":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SolverError, match=r"pip install 'remat\[notebook\]'"):
        slider.widget()
