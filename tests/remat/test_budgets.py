"""Budgets: as they are written, and what they bound on a CUDA device."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import remat
from remat.analysis.plan_figures import predict_reserved
from remat.budgets import Budget, auto_bytes, budget_again, parse_budget, unmodified
from remat.caches.known_plans import KnownPlans
from remat.graph_capture.devices.memory import free_bytes
from remat.graph_capture.errors import BudgetError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.tracing.trace import trace
from remat.schedules.reserved import EXPANDABLE_CONF
from remat.solved import Solved, infeasible_text, planned_text
from remat.solver.budgets.sweep import price_of_gib
from remat.solver.result import update_peak_bytes

CONF, _, EXPANDABLE = EXPANDABLE_CONF.partition("=")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("0.5 gib", 2**29),
        (" 64 KiB ", 2**16),
        ("1000B", 1000),
        (12345, 12345),
    ],
)
def test_sizes(text: str | int, size_bytes: int) -> None:
    assert parse_budget(text) == Budget("bytes", size_bytes=size_bytes)


def test_shares_and_words() -> None:
    assert parse_budget("60%") == Budget("share", share=0.6)
    assert parse_budget("37.5 %") == Budget("share", share=0.375)
    assert parse_budget("auto") == Budget("auto")
    assert parse_budget("MIN") == Budget("min")
    for text in ("20GiB", "60%", "auto"):
        asked = parse_budget(f"{text} Allocated")
        assert (asked.is_allocated, asked.kind) == (True, parse_budget(text).kind)


def test_a_number_without_unit_is_refused_with_what_it_may_mean() -> None:
    with pytest.raises(
        BudgetError, match=r"'60' has no unit. Did you mean 60 bytes\? Write 60%, 60MiB or 60GiB"
    ):
        parse_budget("60")


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ("8GiX", "unknown unit 'gix': write 8MiB or 8GiB"),
        ("lots", "cannot be read: write it like 8GiB"),
        ("", "cannot be read"),
        ("allocated", "budget 'allocated' cannot be read"),
        ("8GiB allocated allocated", "cannot be read"),
        ("9" * 400 + "GiB", "cannot be read"),
        ("9" * 400 + "%", "cannot be read"),
        ("0MiB", "leaves nothing to spend"),
        ("-1GiB", "leaves nothing to spend"),
        ("0%", "a share above 0%"),
        (0, "leaves nothing to spend"),
        (True, "is no size"),
        (8.5, "is a float"),
    ],
)
def test_refusals(budget: object, says: str) -> None:
    with pytest.raises(BudgetError, match=says):
        parse_budget(budget)  # type: ignore[arg-type]  # wrong on purpose


def test_auto_leaves_a_tenth() -> None:
    assert 0 < auto_bytes() < free_bytes()


# On a CUDA device bytes bound what the allocator reserves.


def made() -> tuple[nn.Module, dict[str, Any]]:
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in "12345"]
    given = {"args": (torch.randn(2048, 256),), "loss_fn": torch.sum, "device": "h100"}
    return nn.Sequential(*layers), given


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    model, given = made()
    return remat.capture(model, **given)


def reserved_bytes(graph: TrainingGraph, conf: str, plan: Any = None) -> int:
    both = predict_reserved(graph, plan)
    return (both.expandable if conf else both.default).reserved_bytes


@pytest.mark.parametrize("conf", ["", EXPANDABLE])
def test_bytes_bound_what_the_allocator_reserves(
    graph: TrainingGraph, monkeypatch: pytest.MonkeyPatch, conf: str
) -> None:
    monkeypatch.setenv(CONF, conf)
    size_bytes = int(0.8 * unmodified(graph).peak_bytes)
    of_tensors, plan = (
        remat.solve(graph, f"{size_bytes}B allocated"),
        remat.solve(graph, size_bytes),
    )
    assert plan.reserved_bytes == reserved_bytes(graph, conf, plan) <= size_bytes
    assert size_bytes < reserved_bytes(graph, conf, of_tensors)
    assert (plan.budget_bytes, of_tensors.reserved_bytes) == (size_bytes, 0)
    assert 0 < of_tensors.overhead <= plan.overhead < 0.5
    # The bound is of all plans that reserve so little, and theirs may have larger tensors.
    assert plan.lower_bound_us <= of_tensors.lower_bound_us
    assert "of reserved memory" in planned_text("M", Solved(graph, plan), None, 1.0)
    assert "of allocated memory" in planned_text("M", Solved(graph, of_tensors), None, 1.0)


def test_where_the_unmodified_step_fits_nothing_is_recomputed(graph: TrainingGraph) -> None:
    whole_bytes = reserved_bytes(graph, "")
    assert whole_bytes > unmodified(graph).peak_bytes
    assert remat.solve(graph, whole_bytes).overhead == 0
    assert remat.solve(graph, whole_bytes - 1).overhead > 0
    for budget in ("100%", f"{unmodified(graph).peak_bytes}B allocated"):
        assert remat.solve(graph, budget).overhead == 0


def test_a_budget_below_all_plans_names_one_that_is_enough(
    graph: TrainingGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONF, "")
    least_bytes = remat.solve(graph, "min").peak_bytes
    lost = remat.solve(graph, least_bytes)
    assert lost.schedule is None
    assert least_bytes < lost.least_feasible_bytes
    said = infeasible_text(lost)
    assert "the least that a schedule is known to reserve.\nThat is held by resident, " in said
    found = remat.solve(graph, lost.least_feasible_bytes)
    assert reserved_bytes(graph, "", found) <= lost.least_feasible_bytes


def test_room_for_the_update_is_no_room_for_tensors_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CONF, "")
    model, given = made()
    graph = remat.capture(model, **given, optimizer="adamw")
    update_bytes = update_peak_bytes(graph)
    assert (
        reserved_bytes(graph, "", remat.solve(graph, f"{update_bytes}B allocated")) > update_bytes
    )
    plan = remat.solve(graph, update_bytes)
    assert reserved_bytes(graph, "", plan) <= update_bytes
    lost = remat.solve(graph, update_bytes - 1)
    assert (lost.status, lost.least_feasible_bytes) == ("infeasible", update_bytes)
    assert "AdamW(..., fused=True)" in infeasible_text(lost)


def test_no_time_at_all_is_no_negative_time(graph: TrainingGraph) -> None:
    size_bytes = int(0.8 * unmodified(graph).peak_bytes)
    for budget in (size_bytes, f"{size_bytes}B allocated"):
        assert remat.solve(graph, budget, time_limit_s=0).status == "time limit"


@pytest.mark.parametrize(
    "conf", ["garbage_collection_threshold:0.8", "backend:cudaMallocAsync", "what_is_new:1"]
)
def test_where_it_is_not_predicted_allocated_bytes_are_bound(
    graph: TrainingGraph, monkeypatch: pytest.MonkeyPatch, conf: str
) -> None:
    monkeypatch.setenv(CONF, conf)
    plan = remat.solve(graph, unmodified(graph).peak_bytes)
    assert (plan.overhead, plan.reserved_bytes) == (0, 0)
    assert "of allocated memory" in planned_text("M", Solved(graph, plan), None, 1.0)


def test_communication_and_a_cpu_have_budgets_of_allocated_bytes(graph: TrainingGraph) -> None:
    asked = parse_budget("1GiB")
    assert asked.settings(graph) is not None
    first = msgspec.structs.replace(graph.ops[0], target="_c10d_functional.all_reduce.default")
    reduced = msgspec.structs.replace(graph, ops=(first, *graph.ops[1:]))
    assert asked.settings(reduced) is None
    assert asked.settings(msgspec.structs.replace(graph, device="cpu")) is None


def test_what_is_solved_after_a_plan_is_of_its_tensors(graph: TrainingGraph) -> None:
    plan = remat.solve(graph, int(0.8 * unmodified(graph).peak_bytes))
    assert plan.of_tensors.budget_bytes < plan.budget_bytes
    assert price_of_gib(graph, plan).budget_bytes == plan.of_tensors.budget_bytes
    assert budget_again(plan) == f"{plan.budget_bytes}B"
    assert budget_again(plan.of_tensors) == f"{plan.of_tensors.budget_bytes}B allocated"


def test_a_schedule_at_hand_reserves_no_more_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remat.budgets, "has_cuda_allocator", lambda _: True)  # traced on this CPU
    model, given = made()
    known, traced = KnownPlans(), trace(model, **given)
    whole = known.at_hand(traced, parse_budget("9GiB"), may_keep_all=True)
    assert whole is not None
    size_bytes = whole.peak_bytes
    for text, is_there in ((f"{size_bytes}B", False), (f"{size_bytes}B allocated", True)):
        found = known.at_hand(traced, parse_budget(text), may_keep_all=True)
        assert (found is not None) == is_there
