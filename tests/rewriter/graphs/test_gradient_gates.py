"""A plan that accumulates releases each gradient as it is made, as eager's autograd does."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from examples.gpt import GPT, Sizes
from remat import solver
from remat.budgets import unmodified
from remat.graph_capture import capture, measure_costs, trace
from remat.graph_capture.devices.memory_events import measure_peak
from remat.graph_capture.eager_step import with_eager_sizes
from remat.graph_capture.graph import ACCUMULATE
from remat.rewriter.checking.check import check
from remat.rewriter.plans.loading import load_plan, plan_of, save_plan
from remat.rewriter.rewriting import rewrite
from remat.rewriter.user_module.module import RematModule
from remat.schedules.simulate import simulate
from tests.limits import AMPLE_S
from tests.models import MODELS, make
from tests.rows import rows
from tests.steps import schedule_of

Gradients = dict[str, Tensor | None]


def accumulating(name: str, kind: str = "chen_sqrt") -> tuple[nn.Module, RematModule, Any]:
    model, args, kwargs, loss_fn, target = make(name)
    traced = trace(model, args, kwargs, loss_fn=loss_fn, target=target, accumulate=True)
    return model, rewrite(model, schedule_of(measure_costs(traced), kind), trace=traced), args


def gradients(module: nn.Module) -> Gradients:
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def same(one: Gradients, other: Gradients) -> bool:
    assert list(one) == list(other)
    return all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def short_gpt(batch: int, length: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Two blocks whose parameters weigh more than what one batch keeps for backward."""
    torch.manual_seed(0)
    model = GPT(Sizes(layers=2, width=48, seq=length, batch=batch, vocab=128))
    tokens = torch.randint(128, (batch, length + 1))
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@pytest.mark.parametrize(
    ("batch", "length", "share"),
    [
        (1, 16, 1.0),
        pytest.param(1, 16, 0.0, marks=pytest.mark.slow),
        pytest.param(2, 64, 0.6, marks=pytest.mark.slow),
    ],
)
def test_no_plan_needs_more_than_eager_and_its_peak_is_as_predicted(
    batch: int, length: int, share: float
) -> None:
    model, args = short_gpt(batch, length)
    graph = capture(model, args, accumulate=True)
    resident = graph.resident.total_bytes
    most = simulate(graph, schedule_of(graph, "store_all")).peak_bytes
    result = solver.solve_within(
        graph, resident + int(share * (most - resident)), "cut", time_limit_s=AMPLE_S
    )
    if result.schedule is None:
        result = solver.solve_within(
            graph, result.least_feasible_bytes, "cut", time_limit_s=AMPLE_S
        )
    assert result.schedule is not None
    module = rewrite(model, result.schedule)
    found = check(model, module, args, accumulate=True, steps=1)
    assert found.equal
    assert found.plan_peak_bytes == pytest.approx(result.peak_bytes, rel=0.002)
    assert found.plan_peak_bytes <= found.baseline_peak_bytes
    eager = with_eager_sizes(graph)
    unmodified = simulate(eager, schedule_of(eager, "store_all")).peak_bytes
    assert found.baseline_peak_bytes == pytest.approx(unmodified, rel=0.04)


@pytest.mark.parametrize("name", ["attention", "two_heads", "frozen_batch_norm"])
def test_no_gradient_waits_beyond_the_op_that_makes_it(name: str) -> None:
    """Where small ones waited for large ones, a step that keeps everything needed more."""
    model, args, kwargs, loss_fn, target = make(name)
    graph = capture(model, args, kwargs, loss_fn=loss_fn, target=target, accumulate=True)
    schedule = schedule_of(graph, "store_all")
    found = check(
        model, rewrite(model, schedule), args, kwargs,
        loss_fn=loss_fn, target=target, accumulate=True, steps=1,
    )  # fmt: skip
    assert found.plan_peak_bytes == simulate(graph, schedule).peak_bytes
    assert found.plan_peak_bytes <= found.baseline_peak_bytes
    maker = {name: op.name for op in graph.ops for name in op.outputs}
    before = [op.name for op in graph.ops]
    for at, op in enumerate(graph.ops):
        if op.target == ACCUMULATE:
            assert {maker[name] for name in op.inputs} == {before[at - 1]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["store_all", "cut"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_eagers_gradients_at_the_predicted_peak(name: str, kind: str) -> None:
    model, args, kwargs, loss_fn, target = make(name)
    graph = capture(model, args, kwargs, loss_fn=loss_fn, target=target, accumulate=True)
    assert any(op.target == ACCUMULATE for op in graph.ops)
    schedule = schedule_of(graph, kind)
    found = check(
        model, rewrite(model, schedule), args, kwargs,
        loss_fn=loss_fn, target=target, accumulate=True, steps=1,
    )  # fmt: skip
    assert found.equal
    assert found.plan_peak_bytes == simulate(graph, schedule).peak_bytes


@pytest.mark.parametrize("name", rows(MODELS, {"user_checkpoint"}.__contains__))
def test_no_model_needs_more_than_eager_at_100_per_cent(name: str) -> None:
    model, args, kwargs, loss_fn, target = make(name)
    graph = capture(model, args, kwargs, loss_fn=loss_fn, target=target, accumulate=True)
    schedule = remat.solve(graph, "100%", "cut", time_limit_s=AMPLE_S).schedule
    assert schedule is not None
    found = check(
        model, rewrite(model, schedule), args, kwargs,
        loss_fn=loss_fn, target=target, accumulate=True, steps=1,
    )  # fmt: skip
    assert found.equal
    assert found.plan_peak_bytes <= found.baseline_peak_bytes
    assert unmodified(graph).peak_bytes == pytest.approx(found.baseline_peak_bytes, rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["100%", "93%", "min"])
def test_the_example_of_one_short_text_needs_no_more_than_eager(budget: str) -> None:
    """Returned together, its gradients alone took it from 97.7 to 126.8 MiB."""
    from examples.gpt import factory

    case = factory(batch=1, sequence=64)
    graph = capture(case["model"], case["args"], accumulate=True)
    schedule = remat.solve(graph, budget, time_limit_s=10).schedule
    assert schedule is not None
    module = rewrite(case["model"], schedule)
    found = check(case["model"], module, case["args"], accumulate=True, steps=1)
    assert found.equal
    assert found.gradients == 76
    assert found.plan_peak_bytes == pytest.approx(simulate(graph, schedule).peak_bytes, rel=0.002)
    assert found.plan_peak_bytes <= found.baseline_peak_bytes
    assert found.plan_peak_bytes - graph.resident.total_bytes <= 16.1 * 2**20


def test_microbatches_add_up_to_the_same_bits() -> None:
    model, args = short_gpt(2, 32)
    graph = capture(model, args, accumulate=True)
    eager, plan = copy.deepcopy(model), rewrite(model, schedule_of(graph, "chen_sqrt"))
    for module in (eager, plan):
        torch.manual_seed(3)
        for _ in range(3):
            module(*args).backward()
    assert same(gradients(eager), gradients(plan))


def test_each_gradient_is_taken_before_the_next_is_made() -> None:
    _, module, args = accumulating("plain", "store_all")
    taken_after: list[int] = []
    ops = Counted()
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: taken_after.append(ops.number))
    with ops:
        loss = module(*args)
        begun_after = ops.number
        loss.backward()
    assert len(taken_after) == len(list(module.parameters()))
    assert len(set(taken_after)) == len(taken_after)
    assert begun_after < taken_after[0] < taken_after[-1] <= ops.number


class Counted(TorchDispatchMode):
    """Counts ops."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_gradients_that_a_hook_lets_go_of_cost_nothing() -> None:
    """As where an optimizer's step is in the hook."""
    model, args = short_gpt(1, 16)
    graph = capture(model, args, accumulate=True)
    plan = schedule_of(graph, "chen_sqrt")
    module = rewrite(model, plan)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    module(*args).backward()
    planned_bytes = simulate(graph, plan).peak_bytes - graph.resident.total_bytes
    assert planned_bytes < sum(p.nbytes for p in module.parameters())
    assert measure_peak(lambda: module(*args).backward()) == pytest.approx(planned_bytes, rel=0.01)


def test_autograd_grad_sets_no_gradient_and_runs_only_what_it_needs() -> None:
    model, module, args = accumulating("plain", "store_all")
    assert list(dict(module.named_parameters()))[-1] == "body.6.bias"
    eager, ops, taken = copy.deepcopy(model), Counted(), list[int]()
    expected = torch.autograd.grad(eager(*args), list(eager.parameters())[-1:])
    last = list(module.parameters())[-1:]
    with ops:
        for wanted in (last, None):
            loss, before = module(*args), ops.number
            if wanted is None:
                loss.backward()
            else:
                assert torch.equal(torch.autograd.grad(loss, wanted)[0], expected[0])
                assert all(p.grad is None for p in module.parameters())
            taken.append(ops.number - before)
    assert taken[0] < taken[1]


def test_a_penalty_on_parameters_is_added_as_eager_adds_it() -> None:
    model, module, args = accumulating("plain")
    eager = copy.deepcopy(model)
    for one in (eager, module):
        for _ in range(2):
            penalty = sum(p.square().sum() for p in one.parameters())
            (one(*args) + 0.01 * penalty).backward()
    assert same(gradients(eager), gradients(module))


def test_a_wrapper_for_ranks_takes_the_gradients_as_ever() -> None:
    model, module, args = accumulating("plain")
    eager = copy.deepcopy(model)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for wrapped in (DistributedDataParallel(eager), DistributedDataParallel(module)):
            with wrapped.no_sync():
                wrapped(*args).backward()
            wrapped(*args).backward()
    finally:
        torch.distributed.destroy_process_group()
    assert same(gradients(eager), gradients(module))


def test_what_a_pass_leaves_goes_when_the_graph_goes() -> None:
    """As when `torch.autograd.grad` needs a part of backward."""
    _, module, args = accumulating("plain", "store_all")
    x = args[0].clone()
    held, loss = weakref.ref(x), module(x)
    torch.autograd.grad(loss, list(module.parameters())[-1:])
    del x, loss
    assert held() is None


def test_a_step_after_a_hook_that_failed_is_eagers() -> None:
    model, module, args = accumulating("plain", "store_all")
    eager = copy.deepcopy(model)

    def fail(_: Tensor) -> None:
        raise KeyError("a hook of the user's")

    handle = module.get_parameter("body.4.weight").register_post_accumulate_grad_hook(fail)
    with pytest.raises(KeyError, match="user's"):
        module(*args).backward()
    handle.remove()
    for one in (eager, module):
        one.zero_grad()
        one(*args).backward()
    assert same(gradients(eager), gradients(module))


def test_a_kept_plan_releases_gradients_in_another_module(tmp_path: Path) -> None:
    model, module, args = accumulating("plain")
    save_plan(plan_of(module), tmp_path / "plan.json")
    other = copy.deepcopy(model)
    for again in (
        load_plan(tmp_path / "plan.json", other),
        rewrite(copy.deepcopy(model), module.schedule, args),
    ):
        assert again._remat_compiled_step.gradient_gates is not None
        assert check(other, load_plan(plan_of(again), other), args, accumulate=True, steps=1).equal


class ReturnsItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).sum(), x[0]


class WritesItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return self.linear(x).sum()


@pytest.mark.parametrize("kind", [ReturnsItsInput, WritesItsWeight])
def test_gradients_are_returned_together_where_an_input_is_returned_or_written(
    kind: type[nn.Module],
) -> None:
    x = torch.randn(4, 8, requires_grad=kind is ReturnsItsInput)
    model = kind()
    graph = capture(model, (x,), accumulate=True)
    assert not any(op.target == ACCUMULATE for op in graph.ops)
    module = rewrite(model, schedule_of(graph, "store_all"))
    assert check(model, module, (x,), accumulate=True, steps=1).equal


@pytest.mark.slow
def test_inductor_returns_them_together() -> None:
    model, args, *_ = make("plain")
    traced = trace(model, args, accumulate=True)
    schedule = schedule_of(measure_costs(traced), "store_all")
    module = rewrite(model, schedule, trace=traced, compile=True)
    assert module._remat_compiled_step.gradient_gates is None
    assert check(model, module, args, accumulate=True, steps=1).equal
