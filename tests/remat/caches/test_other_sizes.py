"""A batch of another size is neither timed nor solved for, keeps the budget, and trains alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.budgets import unmodified
from remat.caches.known_plans import KnownPlans
from remat.graph_capture.costs.op_costs import Sized
from remat.graph_capture.errors import AuditError, ScheduleError
from remat.graph_capture.tracing.trace import trace
from remat.rewriter.checking.audit import Audit
from remat.schedules.family import resized_schedule
from remat.schedules.schedule import Schedule
from remat.step_spec import StepSpec
from tests.graph_capture.chunking.language_models import made
from tests.remat.caches.counted import (
    ROWS,
    Counts,
    Net,
    counted,
    net,
    require_eagers_step,
    rows,
    stepped,
)
from tests.steps import schedules_of
from tests.threads import torch_threads


def part_of_peak(model: nn.Module, count: int, share: float) -> int:
    return int(share * unmodified(remat.capture(model, (rows(count),))).peak_bytes)


def last_plan(fast: Any) -> Schedule:
    found = schedules_of(fast)[-1]
    assert isinstance(found, Schedule)
    return found


def recomputes(fast: Any) -> bool:
    return max(last_plan(fast).computations().values()) > 1


def measured_peak(model: nn.Module, fast: Any, count: int) -> int:
    found = remat.check(model, fast, (rows(count),), steps=0)
    assert found.equal
    return found.plan_peak_bytes


@pytest.mark.parametrize("budget", ["bytes", "60%"])
def test_another_size_takes_the_schedule_at_hand(budget: str) -> None:
    model = net()
    most_bytes = part_of_peak(model, ROWS, 0.6)
    fast = remat.rematerialize(model, budget=most_bytes if budget == "bytes" else budget)
    with counted() as counts:
        require_eagers_step(fast, model, rows(ROWS))
        assert recomputes(fast)
        solves = counts.solves
        assert counts == Counts(traces=1, costs=1, solves=solves)
        smaller = ROWS - ROWS // 16
        require_eagers_step(fast, model, rows(smaller))
        assert recomputes(fast)
        require_eagers_step(fast, model, rows(smaller))
        assert counts == Counts(traces=2, costs=1, solves=solves)
    first, second = schedules_of(fast)
    assert isinstance(first, Schedule)
    assert isinstance(second, Schedule)
    assert first.steps == second.steps
    assert first.graph_hash != second.graph_hash
    assert measured_peak(model, fast, smaller) <= most_bytes


def test_what_fits_runs_each_op_once_without_costs() -> None:
    model = net()
    most_bytes = part_of_peak(model, ROWS, 0.6)
    fast = remat.rematerialize(model, budget=most_bytes)
    with counted() as counts:
        for count in (ROWS // 4, ROWS // 8):
            require_eagers_step(fast, model, rows(count))
            assert not recomputes(fast)
        assert counts == Counts(traces=2)
        require_eagers_step(fast, model, rows(ROWS))
        assert recomputes(fast)
        assert counts.costs == 1
        assert counts.solves > 0
    assert measured_peak(model, fast, ROWS // 4) <= most_bytes


def test_a_larger_batch_that_does_not_fit_is_planned() -> None:
    model = net()
    fast = remat.rematerialize(model, budget=part_of_peak(model, 2 * ROWS, 0.7))
    with counted() as counts:
        for count in (ROWS, 2 * ROWS):
            require_eagers_step(fast, model, rows(count))
        assert (counts.traces, counts.costs) == (2, 1)
    assert measured_peak(model, fast, 2 * ROWS) <= part_of_peak(model, 2 * ROWS, 0.7)


def test_the_one_with_least_overhead_is_taken() -> None:
    model, known = net(), KnownPlans()
    graph = remat.capture(model, (rows(ROWS),))
    for share in (0.6, 0.8, 0.7):
        result = remat.solve(graph, part_of_peak(model, ROWS, share), "cut")
        known.note(remat.solved.Solved(graph, result))
    for share in (0.8, 0.7, 0.6, 0.3):
        traced = trace(model, (rows(ROWS - 16),))
        limit_bytes = part_of_peak(model, ROWS, share)
        budget = remat.budgets.parse_budget(limit_bytes)
        found = known.at_hand(traced, budget, may_keep_all=False)
        if share == 0.3:
            assert found is None
            continue
        assert found is not None
        same = remat.solve(graph, limit_bytes, "cut").schedule
        assert same is not None
        assert found.schedule.steps == same.steps
        assert found.peak_bytes <= limit_bytes == found.schedule.budget_bytes


def test_sizes_are_those_of_a_costed_graph() -> None:
    model, args = made("with_bias")
    graph, sized = remat.capture(model, args), Sized(trace(model, args)).graph
    assert [op.workspace_bytes for op in sized.ops] == [op.workspace_bytes for op in graph.ops]
    assert (sized.values, sized.resident) == (graph.values, graph.resident)
    assert sized.time_us == 0


def test_a_step_of_another_structure_is_planned() -> None:
    model = net()
    fast = remat.rematerialize(model, budget=part_of_peak(model, ROWS, 0.6))
    with counted() as counts:
        require_eagers_step(fast, model, rows(ROWS))
        next(model.parameters()).requires_grad_(False)
        require_eagers_step(fast, model, rows(ROWS - 16))
        assert counts.costs == 2


def test_schedules_of_other_ops_are_not_carried() -> None:
    graph = remat.capture(Net(4), (rows(8),))
    result = remat.solve(graph, 2**40)
    assert result.schedule is not None
    assert (
        resized_schedule(result.schedule, trace(Net(4), (rows(16),)).graph).steps
        == result.schedule.steps
    )
    with pytest.raises(ScheduleError, match="for other ops"):
        resized_schedule(result.schedule, trace(Net(3), (rows(8),)).graph)


def test_what_shall_be_recomputed_is_where_all_would_fit() -> None:
    fast = remat.rematerialize(net(), budget="1GiB", recompute="body.0")
    fast(rows(ROWS)).backward()
    assert recomputes(fast)
    assert not StepSpec(net(), solver="full").may_keep_all


def test_chunks_are_taken_along_without_another_trace() -> None:
    model, (tokens, target) = made("with_bias")
    fast = remat.rematerialize(model, budget="min", split="exact")
    # Threads share rows among them, so that with several, chunks of other sizes give other bits.
    with torch_threads(1), counted() as counts:
        for count in (len(tokens), len(tokens) - 1):
            expected = stepped(lambda x: model(x, target[: len(x)]), model, tokens[:count])
            found = stepped(lambda x: fast(x, target[: len(x)]), model, tokens[:count])
            assert all(map(torch.equal, expected, found))
            assert last_plan(fast).chunks
        assert (counts.traces, counts.costs) == (2, 1)


@pytest.mark.parametrize(
    ("options", "compared", "is_audited"),
    [
        ({}, 1, True),
        ({"audit": False}, 1, False),
        ({"check": False}, 0, True),
        ({"check": False, "audit": False}, None, False),
    ],
)
def test_a_schedule_used_again_is_compared_once_by_outputs(
    options: dict[str, Any], compared: int | None, is_audited: bool
) -> None:
    model = net()
    fast = remat.rematerialize(model, budget=part_of_peak(model, ROWS, 0.6), **options)
    fast(rows(ROWS))
    fast(rows(ROWS - 16))
    plan: Any = next(reversed(type(fast)._remat_plans.values()))
    own: Audit | None = plan._remat_audit
    assert (own.audited if own else None) == compared
    assert (fast.audit is not None) == is_audited
    fast(rows(ROWS - 16))
    assert (own.audited if own else None) == (compared + is_audited if own else None)


def test_a_schedule_that_gives_something_else_is_dropped_and_another_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net()
    fast = remat.rematerialize(model, budget=part_of_peak(model, ROWS, 0.6))
    fast(rows(ROWS))
    with monkeypatch.context() as patch:
        patch.setattr(Audit, "differing", lambda *_: ("output",))
        with pytest.raises(AuditError, match="Its own forward gives another output"):
            fast(rows(ROWS - 16))
    assert len(remat.plans(fast)) == 1
    with counted() as counts:
        require_eagers_step(fast, model, rows(ROWS - 16))
        assert counts.costs == 1
