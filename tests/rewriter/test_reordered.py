"""Schedules whose first runs come in another order than captured train bit-identically."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture import TrainingGraph, capture, measure_costs, trace
from remat.graph_capture.joint.build import STATISTICS
from remat.rewriter.checking.check import check
from remat.rewriter.rewriting import rewrite
from remat.rewriter.user_module.module import RematModule
from remat.schedules.schedule import Compute, Schedule
from remat.schedules.simulate import simulate
from remat.solver import solve_within
from remat.solver.orders.reorder import lowest_order
from remat.solver.problem import Order, Problem, is_allowed, predecessors, reordered
from remat.solver.state import schedule_of
from tests.limits import AMPLE_S
from tests.models import make
from tests.rows import each_nth

NAMES = [
    "attention_with_dropout", "batch_norm_in_place_relu", "dropout", "feature_and_alpha_dropout",
    "in_place_views", "lstm_cells", "nested_outputs_and_kwargs", "noise", "overwritten_buffer",
    "tied_weights", "transformer_layers", "user_checkpoint",
]  # fmt: skip


def random_order(graph: TrainingGraph, seed: int) -> Order:
    """An allowed order, each next op drawn from those that are ready."""
    source = random.Random(seed)
    before = predecessors(graph)
    order: list[int] = []
    for phase in (range(graph.n_forward), range(graph.n_forward, len(graph.ops))):
        left = list(phase)
        while left:
            ready = [op for op in left if all(b in order for b in before[op])]
            order.append(source.choice(ready))
            left.remove(order[-1])
    assert is_allowed(graph, order)
    return tuple(order)


def solved_in(graph: TrainingGraph, order: Order, part: float = 0.75) -> Schedule:
    """A schedule whose first runs are in `order`, within that part of its peak if that fits."""
    other = reordered(graph, order)
    resident_bytes = graph.resident.total_bytes
    peak_bytes = solve_within(other, 1 << 60, "store_all").peak_bytes
    budget_bytes = resident_bytes + int(part * (peak_bytes - resident_bytes))
    result = solve_within(other, budget_bytes, "cut", time_limit_s=AMPLE_S)
    if result.schedule is None:
        result = solve_within(other, result.least_feasible_bytes, "cut", time_limit_s=AMPLE_S)
    assert result.schedule is not None
    return result.schedule.with_steps(graph, result.schedule.steps)


def first_runs(schedule: Schedule) -> list[str]:
    return list(dict.fromkeys(s.op for s in schedule.steps if isinstance(s, Compute)))


@pytest.mark.parametrize("name", each_nth(3, NAMES))
def test_any_allowed_order_is_equal_to_eager(name: str) -> None:
    model, args, kwargs, loss_fn, target = make(name)
    traced = trace(model, args, kwargs, loss_fn=loss_fn, target=target)
    graph = measure_costs(traced)
    schedule = solved_in(graph, random_order(graph, 1))
    assert first_runs(schedule) != [op.name for op in graph.ops]
    module = rewrite(model, schedule, trace=traced)
    found = check(model, module, args, kwargs, loss_fn=loss_fn, target=target, steps=1)
    assert found.differences == ()
    assert found.outputs_equal
    assert found.gradients_equal
    assert found.buffers_equal
    assert found.rng_equal
    assert found.gradients == found.gradients_total > 0
    assert found.plan_peak_bytes <= 1.01 * simulate(graph, schedule).peak_bytes


class Branches(nn.Module):
    """Large values that are averaged only when all are there: side by side, needlessly."""

    def __init__(self, count: int = 10) -> None:
        super().__init__()
        self.count = count
        self.body, self.drop = nn.Linear(32, 32), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.body(x))
        large = [y.repeat(1, 64) * (i + 1.0) for i in range(self.count)]
        return sum((wide.mean(1).square().sum() for wide in large), y.sum())


@pytest.mark.slow
def test_one_call_finds_another_order_and_is_equal_to_eager() -> None:
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(64, 32)
    graph = capture(model, (x,))
    budget_bytes = solve_within(graph, 1 << 60, "store_all").peak_bytes * 4 // 10
    fixed = solve_within(graph, budget_bytes, time_limit_s=AMPLE_S)
    fast = remat.rematerialize(
        model, (x,), budget=budget_bytes, order="free", check=True, time_limit_s=AMPLE_S
    )
    assert isinstance(fast, RematModule)
    assert fast.schedule.options["order"] == "free"
    assert first_runs(fast.schedule) != [op.name for op in graph.ops]
    assert fixed.overhead > 0 or fixed.schedule is None
    assert simulate(graph, fast.schedule).overhead < fixed.overhead or fixed.schedule is None
    found = check(model, fast, (x,), steps=3)
    assert found.differences == ()
    assert found.rng_equal
    assert found.gradients == found.gradients_total == 2
    assert found.plan_peak_bytes <= budget_bytes


@pytest.mark.slow
def test_the_order_of_lowest_peak_is_equal_to_eager() -> None:
    model, args, kwargs, loss_fn, target = make("transformer_layers")
    graph = capture(model, args, kwargs, loss_fn=loss_fn, target=target)
    start = reordered(graph, random_order(graph, 2))
    order = lowest_order(start, moves=4000)
    assert order is not None
    schedule = solved_in(start, order)
    schedule = schedule.with_steps(graph, schedule.steps)
    assert first_runs(schedule) != [op.name for op in graph.ops]
    found = check(model, rewrite(model, schedule), args, kwargs, loss_fn=loss_fn, steps=1)
    assert found.differences == ()


def test_a_batch_norm_runs_again_before_its_statistics_are_updated() -> None:
    model, args, kwargs, loss_fn, target = make("batch_norm_in_place_relu")
    graph = capture(model, args, kwargs, loss_fn=loss_fn, target=target)
    statistics = [op.name for op in graph.ops if op.target == STATISTICS]
    norms = [graph.op_index[name.removesuffix("_statistics")] for name in statistics]
    # All that changes buffers keeps its order.
    ordered = {graph.op_index[name] for name in graph.ordered_ops}
    late = sorted(ordered & set(range(graph.n_forward)))
    forward = [i for i in range(graph.n_forward) if i not in late]
    backward = range(graph.n_forward, len(graph.ops))
    schedule = schedule_of(Problem.of(graph), [*forward, *norms, *late, *backward])
    assert len(norms) == 3
    assert all(schedule.computations()[graph.ops[norm].name] == 2 for norm in norms)
    module = rewrite(model, schedule)
    found = check(model, module, args, kwargs, loss_fn=loss_fn, target=target, steps=1)
    assert found.differences == ()
    assert found.buffers_equal
