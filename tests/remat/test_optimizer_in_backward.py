"""The optimizer in backward: eager's bits, in less memory, or refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import remat
from examples.gpt import GPT, Sizes
from remat.budgets import unmodified
from remat.graph_capture.capture_api import add_costs
from remat.graph_capture.devices.known_devices import modelled_device
from remat.graph_capture.devices.memory_events import measure_peak
from remat.graph_capture.errors import CaptureError, PlanError, RewriteError
from remat.graph_capture.graph import UPDATE
from remat.graph_capture.tracing.trace import trace
from remat.levers.optimizer_in_backward import planned_optimizer_in_backward
from remat.ranks.same_order import agreed_load, agreed_rewrite
from remat.rewriter.plans.loading import plan_of
from remat.schedules.simulate import simulate
from tests.fixed_costs import BYTES_PER_US
from tests.limits import AMPLE_S
from tests.models import make

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=1e-2),
    "momentum": lambda p: SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: AdamW(p, lr=1e-3),
    "adamw_foreach": lambda p: AdamW(p, lr=1e-3, foreach=True),
    "adamw_fused": lambda p: AdamW(p, lr=1e-3, fused=True),
}

GAP = 0.2
"""At which searches end soon: what is shown of a plan holds however good it is."""


def short_gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = GPT(Sizes(layers=1, width=96, seq=8, batch=1, vocab=64))
    tokens = torch.randint(64, (1, 9))
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def planned(
    optimizer: str = "momentum", budget: str = "min", *, accumulate: bool = False, **more: Any
) -> tuple[nn.Module, Any, Optimizer, tuple[Tensor, ...]]:
    model, args = short_gpt()
    own = OPTIMIZERS[optimizer](model.parameters())
    fast = remat.rematerialize(
        model,
        args,
        optimizer_in_backward=own,
        budget=budget,
        accumulate=accumulate,
        solver="dtr",
        **more,
    )
    return model, fast, own, args


def trained(
    module: nn.Module, optimizer: Optimizer, args: Any, steps: int, batches: int = 1
) -> list[Any]:
    """Losses and what else a step changes, of an ordinary loop."""
    torch.manual_seed(5)
    schedule, losses = CosineAnnealingLR(optimizer, 10), list[float]()
    is_planned = hasattr(type(module), "_remat_updates")
    for _ in range(steps):
        for i in range(batches):
            held = is_planned and i < batches - 1
            with module.no_update() if held else contextlib.nullcontext():
                loss = module(*args) / batches
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    states = optimizer.state_dict()["state"]
    kept = [states[i][name] for i in sorted(states) for name in sorted(states[i])]
    return [*losses, *(p.detach() for p in module.parameters()), *kept, torch.get_rng_state()]


def same(one: list[Any], other: list[Any]) -> bool:
    assert len(one) == len(other)
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


QUICK = (("momentum", 1), ("adamw", 2))


@pytest.mark.parametrize(
    ("optimizer", "batches"),
    [
        pytest.param(name, n, marks=[] if (name, n) in QUICK else pytest.mark.slow)
        for name in OPTIMIZERS
        for n in (1, 2)
    ],
)
def test_ten_steps_of_gpt_with_dropout_are_eagers(optimizer: str, batches: int) -> None:
    eager, args = short_gpt()
    expected = trained(eager, OPTIMIZERS[optimizer](eager.parameters()), args, 10, batches)
    _, fast, own, _ = planned(optimizer, accumulate=batches > 1, check=False)
    assert same(expected, trained(fast, own, args, 10, batches))
    assert all(p.grad is None for p in fast.parameters())


@pytest.mark.parametrize(
    ("optimizer", "budget"),
    [
        pytest.param(name, budget, marks=[] if name == "adamw" else pytest.mark.slow)
        for name in OPTIMIZERS
        for budget in ("100%", "min")
    ],
)
def test_the_peak_is_as_predicted_and_lower_by_the_gradients(optimizer: str, budget: str) -> None:
    eager, args = short_gpt()
    model, fast, own, _ = planned(optimizer, budget, check=False)
    others = OPTIMIZERS[optimizer](eager.parameters())

    def step(module: nn.Module, optimizer: Optimizer) -> None:
        module(*args).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(eager, others), step(fast, own)
    plan = plan_of(fast)
    assert plan.graph is not None
    resident_bytes = plan.graph.resident.total_bytes
    found = resident_bytes + measure_peak(lambda: step(fast, own))
    assert found == pytest.approx(simulate(plan.graph, plan.schedule).peak_bytes, rel=0.01)
    eagers = resident_bytes + measure_peak(lambda: step(eager, others))
    trained_bytes = sum(p.nbytes for p in model.parameters())
    assert found < eagers - (0.45 if budget == "min" else 0.1) * trained_bytes


@pytest.mark.parametrize(
    ("optimizer", "budget"),
    [
        pytest.param(name, budget, marks=[] if name == "adamw" else pytest.mark.slow)
        for name in OPTIMIZERS
        for budget in ("100%", "min")
    ],
)
def test_the_peak_of_three_batches_is_as_predicted(optimizer: str, budget: str) -> None:
    """The last one gives gradients back, and takes what updates take; the others do neither."""
    model, fast, _, args = planned(optimizer, budget, accumulate=True, check=False)

    def step() -> None:
        for i in range(3):
            with fast.no_update() if i < 2 else contextlib.nullcontext():
                fast(*args).backward()

    step()
    plan = plan_of(fast)
    assert plan.graph is not None
    predicted_bytes = simulate(plan.graph, plan.schedule).peak_bytes
    # The gradients are made within what is measured.
    between_bytes = plan.graph.resident.total_bytes - sum(p.nbytes for p in model.parameters())
    found_bytes = between_bytes + measure_peak(step)
    assert found_bytes == pytest.approx(predicted_bytes, rel=0.002)
    assert found_bytes <= predicted_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "attention_with_dropout", "batch_norm_in_place_relu", "tied_under_three_names",
        "frozen_parameters", "custom_function", "in_place_views", "overwritten_buffer",
        "constant_attribute", "group_and_layer_norm", "transformer_layers", "lstm_cells",
        "double_precision", "bfloat16", "gradients_in_another_layout", "user_checkpoint", "noise",
    ],
)  # fmt: skip
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_models_of_all_kinds_are_trained_as_by_eager(name: str, optimizer: str) -> None:
    model, args, kwargs, _, _ = make(name)
    eager = copy.deepcopy(model)
    own, others = (
        OPTIMIZERS[optimizer]([p for p in one.parameters() if p.requires_grad])
        for one in (model, eager)
    )
    fast: Any = remat.rematerialize(
        model, args, kwargs, optimizer_in_backward=own, budget="min", solver="cut",
        time_limit_s=AMPLE_S, gap=GAP,
    )  # fmt: skip

    def step(module: nn.Module, optimizer: Optimizer) -> None:
        module(*args, **kwargs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for module, its in ((eager, others), (fast, own)):
        torch.manual_seed(3)
        for _ in range(3):
            step(module, its)
    for (key, a), b in zip(eager.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    plan = plan_of(fast)
    assert plan.graph is not None
    step(fast, own)  # the fourth, which is audited
    found = plan.graph.resident.total_bytes + measure_peak(lambda: step(fast, own))
    assert found == pytest.approx(simulate(plan.graph, plan.schedule).peak_bytes, rel=0.01)


def test_the_state_of_the_optimizer_loads_both_ways() -> None:
    eager, args = short_gpt()
    others = OPTIMIZERS["adamw"](eager.parameters())
    model, fast, own, _ = planned("adamw", check=False)
    trained(eager, others, args, 2)
    trained(fast, own, args, 1)
    own.load_state_dict(copy.deepcopy(others.state_dict()))
    model.load_state_dict(eager.state_dict())
    assert same(trained(eager, others, args, 2), trained(fast, own, args, 2))
    others.load_state_dict(copy.deepcopy(own.state_dict()))
    assert same(trained(eager, others, args, 2), trained(fast, own, args, 2))


def test_parameters_that_the_optimizer_lacks_keep_their_gradients() -> None:
    model, args = short_gpt()
    own = SGD([p for n, p in model.named_parameters() if "norm" in n], lr=0.1)
    fast = remat.rematerialize(model, args, optimizer_in_backward=own, budget="100%", check=True)
    eager = copy.deepcopy(model)
    for module in (eager, fast):
        torch.manual_seed(1)
        module(*args).backward()
    before = dict(eager.named_parameters())
    for name, parameter in model.named_parameters():
        is_updated = "norm" in name
        assert (parameter.grad is None) == is_updated, name
        assert torch.equal(parameter, before[name]) != is_updated, name
        if not is_updated:
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, before[name].grad)  # pyright: ignore


class AtTwoPaths(nn.Module):
    """Its first layer stands at two paths, and runs twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        self.layers = nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("accumulate", [False, True])
def test_parameters_of_a_module_at_two_paths_are_updated_too(accumulate: bool) -> None:
    model, args = AtTwoPaths(), (torch.randn(4, 8),)
    eager = copy.deepcopy(model)
    own, beside = (AdamW(one.parameters(), lr=1e-2) for one in (model, eager))
    fast = remat.rematerialize(
        model, args, optimizer_in_backward=own, budget="100%", accumulate=accumulate, gap=GAP
    )
    for _ in range(3):
        fast(*args).backward()
        assert [p.grad for p in model.parameters()] == [None] * 4  # and no step of the optimizer
        eager(*args).backward()
        beside.step()
        beside.zero_grad()
    assert all(map(torch.equal, model.parameters(), eager.parameters()))


def test_no_other_backward_updates() -> None:
    model, fast, _, args = planned(check=False)
    before = [p.detach().clone() for p in model.parameters()]
    torch.autograd.grad(fast(*args), list(model.parameters()))
    model(*args).backward()
    copy.deepcopy(fast)(*args).backward()
    assert all(map(torch.equal, before, model.parameters()))
    model.zero_grad()
    fast(*args).backward()
    assert not all(map(torch.equal, before, model.parameters()))


def test_a_backward_of_some_parameters_updates_these() -> None:
    model, fast, own, args = planned(check=False)
    eager = copy.deepcopy(model)
    others = OPTIMIZERS["momentum"](eager.parameters())
    for module, optimizer in ((eager, others), (fast, own)):
        torch.manual_seed(1)
        module(*args).backward(inputs=list(module.parameters())[3:6])
        optimizer.step()
    assert all(map(torch.equal, eager.parameters(), model.parameters()))


def test_a_penalty_outside_of_the_step_is_part_of_the_gradient() -> None:
    model, fast, own, args = planned(check=False)
    eager = copy.deepcopy(model)
    others = OPTIMIZERS["momentum"](eager.parameters())
    for module, optimizer in ((eager, others), (fast, own)):
        torch.manual_seed(1)
        for _ in range(2):
            penalty = torch.stack([p.square().sum() for p in module.parameters()]).sum()
            (module(*args) + 0.01 * penalty).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, eager.parameters(), model.parameters()))


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_what_cannot_be_right_is_refused_before_anything_runs() -> None:
    model, fast, own, args = planned(check=False)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RewriteError, match=r"module.no_update.*retain_graph=True"):
        fast(*args).backward(retain_graph=True)
    with pytest.raises(RewriteError, match="one backward through two forwards"):
        (fast(*args) + fast(*args)).backward()
    with (
        pytest.raises(RewriteError, match="no room for gradients that stay"),
        fast.no_update(),
    ):
        pass
    with (
        pytest.raises(RewriteError, match="does not update its parameters"),
        remat.rematerialize(model, args, budget="100%", check=False).no_update(),
    ):
        pass
    with one_rank(), pytest.raises(RewriteError, match="DistributedDataParallel"):
        DistributedDataParallel(fast)(*args)
    own.register_step_post_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="hooks on the optimizer's step"):
        fast(*args).backward()
    with pytest.raises(PlanError, match="a file holds no optimizer"):
        agreed_load(plan_of(fast), copy.deepcopy(model))
    with pytest.raises(RewriteError, match="has no optimizer"):
        agreed_rewrite(model, fast.schedule, args)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_planned_says_why() -> None:
    model, args, *_ = make("plain")

    def plan(optimizer: Optimizer, one: nn.Module = model, **more: Any) -> None:
        remat.rematerialize(
            one, args, optimizer_in_backward=optimizer, budget="100%", check=False, **more
        )

    with pytest.raises(CaptureError, match=r"SGD, Adam, AdamW.*LBFGS cannot update"):
        plan(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(CaptureError, match=r"leave out clipping.* the global norm of gradients"):
        plan(SGD(model.parameters()), max_grad_norm=1.0)
    with (
        pytest.raises(CaptureError, match=r"use bfloat16.*GradScaler"),
        torch.autocast("cpu", dtype=torch.float16),
    ):
        plan(SGD(model.parameters()))
    with pytest.raises(CaptureError, match="no parameter of this"):
        plan(SGD(copy.deepcopy(model).parameters()))
    halves = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    whole = torch.randn(128, 64)
    for layer, half in zip(halves, whole.chunk(2), strict=True):
        layer.weight = nn.Parameter(half)
    with pytest.raises(
        CaptureError, match=r"give 0.weight and 1.weight storage.* views of one tensor"
    ):
        plan(SGD(halves.parameters()), halves)
    other = ReadsItsData()
    with pytest.raises(CaptureError, match=r"another tensor of shape \[64, 64\]"):
        plan(SGD(other.parameters()), other)


@pytest.mark.parametrize("wrong", [1, "model"])
def test_what_is_no_module_or_no_optimizer_is_named(wrong: Any) -> None:
    model, args, *_ = make("plain")
    own, kind = SGD(model.parameters()), type(wrong).__name__
    with pytest.raises(CaptureError, match=f"torch.nn.Module, and this is {kind}"):
        remat.rematerialize(wrong, args, optimizer_in_backward=own, budget="100%")
    with pytest.raises(CaptureError, match=f"a {kind} cannot update parameters"):
        remat.rematerialize(model, args, optimizer_in_backward=wrong, budget="100%")


class ReadsItsData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.data = self.linear.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() + (x @ self.data).square().sum()


def test_updates_take_time_in_the_plan() -> None:
    _, fast, _, _ = planned("adamw", "100%", check=False)
    here = plan_of(fast).graph
    assert here is not None
    model, args = short_gpt()
    release = planned_optimizer_in_backward(model, "adamw", "h100")
    there = add_costs(trace(model, args, device="h100", gradient_release=release))
    rate, launch_us = modelled_device("h100").bytes_per_us, there.ops[0].cost_us
    for graph, takes_us in (
        (here, lambda size_bytes: 1.0 + 3 * size_bytes / BYTES_PER_US),
        (there, lambda size_bytes: launch_us + 7 * size_bytes / rate),
    ):
        updates = [op for op in graph.ops if op.target == UPDATE]
        assert updates
        for op in updates:
            read = (graph.value_by_name[name] for name in op.inputs)
            size_bytes = sum(value.size_bytes for value in read if value.kind == "parameter")
            assert op.cost_us == pytest.approx(takes_us(size_bytes), rel=0.02)
        schedule = unmodified(graph).schedule
        assert schedule is not None
        others_us = sum(op.cost_us for op in graph.ops if op.target != UPDATE)
        assert simulate(graph, schedule).time_us > others_us
