"""A plan from a solve to a module, a file and back; what is no plan's to answer is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from tests.models import make

ROWS = {"input": {0: ("rows", 4, 64)}}


def chain() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(64, 32)


def test_a_plan_is_applied_kept_and_read_again(tmp_path: Path) -> None:
    model, x = chain()
    plan = remat.solve(remat.capture(model, (x,)), "80%", "cut")
    fast = plan.apply(model)
    assert remat.check(model, fast, (x,), steps=0).equal
    (own,) = remat.plans(fast)
    assert own.schedule == plan.schedule
    assert (own.peak_bytes, own.time_us) == (plan.peak_bytes, plan.time_us)
    own.save(tmp_path / "plan.json")
    read = remat.load(tmp_path / "plan.json")
    assert read.schedule == plan.schedule
    assert torch.equal(read.apply(model)(x), model(x))
    assert read.simulate().peak_bytes == plan.peak_bytes


def test_a_plan_over_a_range_has_the_figures_of_the_largest_sizes(tmp_path: Path) -> None:
    model, x = chain()
    step = remat.capture(model, (x,), dynamic=ROWS)
    plan = remat.solve(step, "80%", "cut")
    assert isinstance(step, remat.Step)
    assert plan.family is not None
    assert plan.simulate().peak_bytes <= plan.peak_bytes <= plan.budget_bytes
    assert min(one.peak_bytes for one in plan.peaks()) <= plan.budget_bytes
    fast = plan.apply(model)
    assert torch.equal(fast(x[:9]), model(x[:9]))
    remat.plans(fast)[0].save(tmp_path / "plan.json")
    assert remat.load(tmp_path / "plan.json").family == plan.family


def test_a_schedule_at_hand_is_a_plan_with_the_simulators_figures() -> None:
    model, x = chain()
    step = remat.capture(model, (x,))
    found = remat.solve(step, "80%", "cut")
    assert found.schedule is not None
    made = remat.Plan.of(step, found.schedule)
    assert (made.peak_bytes, made.overhead) == (found.peak_bytes, found.overhead)
    assert remat.check(model, made.apply(model), (x,), steps=0).equal


def test_a_plan_at_hand_may_be_the_answer() -> None:
    model, x = chain()
    step = remat.capture(model, (x,))
    plan = remat.solve(step, "80%", "cut")
    assert remat.solve(step, "80%", "cut", at_hand=plan).schedule is not None


def least() -> remat.Plan:
    model, x = chain()
    return remat.solve(remat.capture(model, (x,)), 1, "store_all")


def solved() -> remat.Plan:
    model, x = chain()
    return remat.solve(remat.capture(model, (x,)), "100%", "store_all")


def of_one_schedule() -> remat.Plan:
    model, x = chain()
    step = remat.capture(model, (x,), dynamic=ROWS)
    assert isinstance(step, RangedGraph)
    schedule = remat.solve(step.top, "100%", "store_all").schedule
    assert schedule is not None
    return remat.Plan.of(step, schedule)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "apply where nothing fits": (
        lambda: least().apply(chain()[0]), remat.BudgetError, "no schedule within|is below",
    ),
    "save a plan of no model": (
        lambda: solved().save("plan.json"), remat.PlanError, "apply the plan, and save that",
    ),
    "plans of what follows none": (
        lambda: remat.plans(chain()[0]), remat.PlanError, "a Sequential follows no plan",
    ),
    "plans of no module": (lambda: remat.plans(3), remat.PlanError, "pass what .*this is int"),
    "load of no path": (
        lambda: remat.load(solved()), remat.PlanError,  # pyright: ignore[reportArgumentType]
        "pass the file's path.*this is Plan",
    ),
    "a range of one size": (lambda: solved().overheads(), remat.PlanError, "is for one size"),
    "a curve of one schedule": (
        lambda: of_one_schedule().overheads(), remat.PlanError, "has one schedule for the whole",
    ),
    "an arena of no module": (lambda: solved().use_arena(), remat.PlanError, "apply it, and ask"),
    "a check of a plan": (
        lambda: remat.check(chain()[0], solved()),  # pyright: ignore[reportArgumentType]
        remat.PlanError, "pass the model.*this is Plan",
    ),
    "a sweep of a model": (
        lambda: remat.sweep(chain()[0]),  # pyright: ignore[reportArgumentType]
        remat.SolverError, "pass what remat.capture returned.*this is Sequential",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_a_plan_cannot_answer_says_what_to_do(name: str) -> None:
    ask, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        ask()


def test_plans_of_blocks_and_of_a_cache() -> None:
    model, args, *_ = make("plain")
    lazy = remat.rematerialize(model, budget="100%", check=False, verbose=False)
    assert remat.plans(lazy) == []
    lazy(*args)
    (plan,) = remat.plans(lazy)
    assert plan.status in ("optimal", "feasible")
    assert "peak 0" not in repr(plan)
