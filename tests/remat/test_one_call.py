"""The Python API in the words of its documentation."""

from __future__ import annotations

import runpy

import msgspec
import pytest
import torch

import remat
from remat import checks
from remat.budgets import parse_budget, unmodified
from remat.graph_capture.errors import BudgetError, RewriteError, SolverError
from remat.ranks.same_order import agreed_rewrite
from remat.rewriter.checking import check
from remat.schedules.simulate import simulate
from tests.limits import AMPLE_S
from tests.models import make
from tests.paths import ROOT


def test_step_by_step() -> None:
    model, args, _, loss_fn, target = make("loss_function_with_target")
    graph = remat.capture(model, args, {}, loss_fn=loss_fn, target=target, device="cpu")
    result = remat.solve(graph, budget="70%", solver="auto", time_limit_s=AMPLE_S)
    assert result.schedule is not None
    assert result.peak_bytes <= result.budget_bytes
    assert simulate(graph, result.schedule).peak_bytes == result.peak_bytes
    module = agreed_rewrite(model, result.schedule)
    found = remat.check(model, module, args, loss_fn=loss_fn, target=target)
    assert found.equal
    assert found.plan_peak_bytes <= result.budget_bytes


def test_one_call_gives_a_module_whose_gradients_are_the_models() -> None:
    model, args, _, loss_fn, target = make("loss_function_with_target")
    fast = remat.rematerialize(model, args, loss_fn=loss_fn, target=target, budget="70%")
    fast(*args, target=target).backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    assert loss_fn is not None
    loss_fn(model(*args), target).backward()
    assert all(
        torch.equal(p.grad, g)
        for p, g in zip(model.parameters(), found, strict=True)
        if g is not None
    )
    assert all(g is not None for g in found)


@pytest.mark.slow
def test_the_first_notebook_keeps_to_its_budget() -> None:
    names = runpy.run_path(str(ROOT / "notebooks" / "1_first_plan.py"))
    assert names["found"].plan_peak_bytes <= names["result"].budget_bytes


def test_budgets_of_every_kind_mean_bytes() -> None:
    model, args, *_ = make("dropout")
    graph = remat.capture(model, args)
    peak_bytes = unmodified(graph).peak_bytes
    assert parse_budget("60%").bytes_for(graph) == int(0.6 * peak_bytes)
    assert parse_budget(12345).bytes_for(graph) == 12345
    assert parse_budget("auto").bytes_for(graph) > peak_bytes
    least = remat.solve(graph, "min", gap=0.5)
    assert least.schedule is not None
    assert least.peak_bytes <= least.budget_bytes < 0.6 * peak_bytes


@pytest.mark.clock
def test_the_least_budget_of_a_free_order_is_no_larger() -> None:
    model, args, *_ = make("dropout")
    graph = remat.capture(model, args)
    least = remat.solve(graph, "min")
    anyhow = remat.solve(graph, "min", order="free", time_limit_s=3)
    assert anyhow.schedule is not None
    assert anyhow.budget_bytes <= least.budget_bytes


def test_what_cannot_be_done_is_said() -> None:
    model, args, *_ = make("plain")
    with pytest.raises(BudgetError, match=r"(?s)try budget=.*below .*the lowest peak .* held by "):
        remat.rematerialize(model, args, budget="1KiB")
    with pytest.raises(BudgetError, match=r"Below .*iB, set by .*No schedule needs less"):
        remat.rematerialize(model, args, budget="1KiB")
    with pytest.raises(BudgetError, match="has no unit"):
        remat.rematerialize(model, args, budget="60")
    with pytest.raises(SolverError, match=r"use solver auto, .* for order free: "):
        remat.rematerialize(model, args, budget="80%", solver="cut", order="free")
    with pytest.raises(SolverError, match="did you mean checkmate"):
        remat.rematerialize(model, args, budget="80%", solver="chekmate")


def test_a_difference_from_eager_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, *_ = make("plain")
    honest = check.check

    def differing(*given: object, **options: object) -> check.Check:
        found = honest(*given, **options)  # pyright: ignore
        return msgspec.structs.replace(found, differences=("gradient of body.0.weight",))

    monkeypatch.setattr(check, "check", differing)
    with pytest.raises(RewriteError, match=r"differs from eager in gradient of body\.0\.weight"):
        remat.rematerialize(model, args, budget="80%")
    assert remat.rematerialize(model, args, budget="80%", check=False) is not None


def test_the_check_is_left_out_where_the_unmodified_step_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, args, *_ = make("plain")
    monkeypatch.setattr(checks, "auto_bytes", lambda _: 1000)
    monkeypatch.setattr(check, "check", lambda *_, **__: pytest.fail("ran the step"))
    with pytest.warns(UserWarning, match=r"not checked against the unmodified step"):
        remat.rematerialize(model, args, budget="80%")


def test_a_least_budget_that_was_named_is_met_however_short_the_time() -> None:
    model, args, kwargs, loss_fn, target = make("transformer_layers")
    graph = remat.capture(model, args, kwargs, loss_fn=loss_fn, target=target)
    for limit_s in (0.0, 0.05, AMPLE_S):
        result = remat.solve(graph, "min", gap=0.5, time_limit_s=limit_s)
        if result.budget_bytes:
            assert result.schedule is not None
            assert simulate(graph, result.schedule).peak_bytes == result.peak_bytes
            assert result.peak_bytes <= result.budget_bytes == result.schedule.budget_bytes
    assert result.schedule is not None
