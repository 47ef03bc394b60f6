"""The largest size that fits: guesses, real captures, and what a step of it takes when run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.graph_capture.errors import BudgetError, FactoryError, SolverError
from remat.graph_capture.graph import TrainingGraph
from remat.job import size_search
from remat.job.fitted import Fit
from remat.job.size_search import SizeRange, graph_at, is_same_step, largest
from remat.ranks.same_order import agreed_rewrite
from remat.schedules.outcome import Result
from remat.solver.budgets.sweep import least_peak
from tests.limits import AMPLE_S

WIDTH = 64


def stack(batch: int = 8, layers: int = 3) -> dict[str, Any]:
    """Layers of a perceptron, and a batch of that size."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers)]
    model = nn.Sequential(*parts)
    x, y = torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)
    return {"model": model, "args": (x,), "loss_fn": nn.functional.mse_loss, "target": y}


def captured(batch: int) -> TrainingGraph:
    made = stack(batch)
    return remat.capture(
        made["model"], made["args"], loss_fn=made["loss_fn"], target=made["target"]
    )


def measured_bytes(batch: int, budget: int | str) -> int:
    """The profiler's peak of a step of the plan at that size."""
    made = stack(batch)
    graph = captured(batch)
    result = remat.solve(graph, budget, time_limit_s=AMPLE_S)
    assert result.schedule is not None
    batch_of: dict[str, Any] = {"loss_fn": made["loss_fn"], "target": made["target"]}
    module = agreed_rewrite(made["model"], result.schedule, made["args"], **batch_of)
    found = remat.check(made["model"], module, made["args"], steps=1, **batch_of)
    assert found.equal
    return found.plan_peak_bytes


@pytest.fixture(scope="module")
def without_recomputing() -> Fit:
    return remat.largest_batch(stack, budget=400_000, max_overhead=0.0, each_s=AMPLE_S)


def test_the_batch_it_names_fits_when_run_and_one_more_does_not(
    without_recomputing: Fit,
) -> None:
    found = without_recomputing
    assert found.size > 4
    assert found.answer is not None
    assert found.next is not None
    assert found.next.size == found.size + 1
    assert found.measured_peak_bytes == found.answer.peak_bytes <= 400_000
    assert measured_bytes(found.size, 400_000) <= 400_000
    assert measured_bytes(found.size + 1, "100%") > 400_000
    assert found.limited_by in ("overhead", "memory")
    assert found.next.overhead > 0 or not found.next.peak_bytes


@pytest.mark.slow
def test_with_more_overhead_a_larger_batch_fits_until_nothing_does(
    without_recomputing: Fit,
) -> None:
    found = remat.largest_batch(stack, budget=400_000, max_overhead=10.0, each_s=AMPLE_S)
    assert found.size > without_recomputing.size
    assert found.limited_by == "memory"
    assert found.next is not None
    assert found.next.least_bytes > 400_000
    assert "is below" in found.next.says
    assert found.measured_peak_bytes is not None
    assert found.measured_peak_bytes <= 400_000
    least = least_peak(captured(found.size + 1), time_limit_s=AMPLE_S)
    assert least.peak_bytes > 400_000
    assert found.without_plan < found.size
    assert f"batch {found.size} is the largest that fits" in str(found)
    assert f"without a plan, about {found.without_plan} would fit" in str(found)


@pytest.mark.parametrize(
    "overhead",
    [0.0, pytest.param(0.2, marks=pytest.mark.slow), pytest.param(10.0, marks=pytest.mark.slow)],
)
def test_few_sizes_are_captured_and_few_are_solved_to_guess(
    overhead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two to begin with, the answer and the next, and one if a guess was not right."""
    solved: list[int] = []
    honest = size_search.FitSearch._solve

    def counted(search: size_search.FitSearch, graph: TrainingGraph, limit_s: float) -> Result:
        solved.append(graph.resident.batch_bytes)
        return honest(search, graph, limit_s)

    monkeypatch.setattr(size_search.FitSearch, "_solve", counted)
    # A guess that is cut off by a clock is wrong more often on a busy machine.
    monkeypatch.setattr(size_search, "GUESS_S", AMPLE_S)
    found = remat.largest_batch(
        stack, budget="1MiB", max_overhead=overhead, each_s=AMPLE_S, check=False
    )
    assert found.answer is not None
    assert found.next is not None
    assert found.next.size == found.size + 1 > 10
    assert len(found.tried) <= 5
    assert len(solved) <= 5 + (16 if overhead else 0)


def test_a_graph_between_two_captures_has_the_bytes_of_a_real_one() -> None:
    one, two, real = captured(4), captured(12), captured(7)
    assert is_same_step(one, two)
    guessed = graph_at(7, (4, one), (12, two))
    assert [v.size_bytes for v in guessed.values] == [v.size_bytes for v in real.values]
    assert guessed.resident == real.resident
    assert [op.name for op in guessed.ops] == [op.name for op in real.ops]
    assert not is_same_step(one, remat.capture(nn.Linear(2, 2), (torch.ones(1, 2),)))


@pytest.mark.parametrize("guessed", [lambda low, high: low, lambda low, high: 10**9, None])
@pytest.mark.parametrize("answer", [1, 5, 16, 17, 40, 96])
@pytest.mark.parametrize("step", [1, 8])
def test_the_search_finds_the_largest_whatever_the_guesses(
    answer: int, step: int, guessed: Any
) -> None:
    sizes, asked = SizeRange(step, 100, step), list[int]()

    def holds(size: int) -> bool:
        asked.append(size)
        assert size % step == 0
        return size <= answer

    def guess(low: int, high: int | None) -> int:
        return answer if guessed is None else min(guessed(low, high), 100)

    found = largest(sizes, holds, guess, None, None)
    expected = answer // step * step
    assert found == (expected or None)
    assert len(asked) == len(set(asked)) <= 30
    if guessed is None:
        assert len(asked) <= 2


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(FactoryError, match=r"takes no argument 'sequence', it takes batch, layers"):
        remat.largest_batch(stack, "sequence", budget="1MiB")
    for budget in ("60%", "min"):
        with pytest.raises(BudgetError, match="is different at each size"):
            remat.largest_batch(stack, budget=budget)
    with pytest.raises(BudgetError, match="unknown unit 'gigs'"):
        remat.largest_batch(stack, budget="8 gigs")
    with pytest.raises(SolverError, match="step must be from 1 to the most"):
        remat.largest_batch(stack, budget="1MiB", step=0)
    with pytest.raises(SolverError, match="give two different first sizes"):
        remat.largest_batch(stack, budget="1MiB", sizes=(3, 3))


def test_where_no_size_fits_it_says_so() -> None:
    found = remat.largest_batch(stack, budget=50_000, each_s=AMPLE_S)
    assert (found.size, found.answer, found.measured_peak_bytes) == (0, None, None)
    assert "no batch fits 48.8 KiB" in str(found)
    assert found.tried[0].size == 1


def test_no_larger_size_is_tried_than_allowed() -> None:
    found = remat.largest_batch(stack, budget="8MiB", most=6, each_s=AMPLE_S, check=False)
    assert (found.size, found.limited_by, found.measured_peak_bytes) == (6, "most", None)
    assert "no larger batch was tried" in str(found)
