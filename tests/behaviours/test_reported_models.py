"""The kinds of models in `reported_models.py` train as eager in three steps, or are refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.optim import SGD
from torch.profiler import profile

import remat
from remat.graph_capture.errors import CaptureError
from remat.schedules.simulate import simulate
from tests.behaviours.reported_models import (
    CASES,
    WIDTH,
    Case,
    Computing,
    block,
    blocks,
    dequantised,
    linear,
    looped,
    profiled,
    sparse_attention,
    telemetry,
    tied_routes,
    tokens,
)
from tests.limits import AMPLE_S

Step = Callable[[nn.Module, tuple[Any, ...]], Any]


def made(case: Callable[[], Case]) -> Case:
    torch.manual_seed(0)
    return case()


def planned(case: Callable[[], Case], budget: str, **options: Any) -> Any:
    """A module that follows a plan, and the plan."""
    model, args = made(case)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the plan is not checked")
        module = remat.rematerialize(
            model, args, budget=budget, verbose=False, **{"time_limit_s": AMPLE_S, **options}
        )
    return module, remat.plans(module)[0]


def one_step(model: nn.Module, args: tuple[Any, ...]) -> Tensor:
    loss = model(*args)
    loss.backward()
    return loss.detach()


def trained(model: nn.Module, args: tuple[Any, ...], step: Step = one_step) -> dict[str, Any]:
    """All that three steps leave behind. Each begins with a batch of the same numbers."""
    torch.manual_seed(7)
    seen: dict[str, Any] = {}
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for i in range(3):
        own = copy.deepcopy(args)
        optimizer.zero_grad()
        seen[f"loss {i}"] = step(model, own)
        seen |= {f"batch {i} {j}": leaf for j, leaf in enumerate(pytree.tree_leaves(own))}
        for name, parameter in model.named_parameters():
            seen[f"gradient {i} {name}"] = copy.deepcopy(parameter.grad)
        optimizer.step()
    return seen | {**copy.deepcopy(model.state_dict()), "stream": torch.get_rng_state()}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b

    assert one.keys() == other.keys()
    return [name for name in one if not same(one[name], other[name])]


def require_as_eager(case: Callable[[], Case], module: nn.Module, step: Step = one_step) -> None:
    model, args = made(case)
    assert differences(trained(model, args, step), trained(module, args, step)) == []


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("solver", ["dtr", pytest.param("auto", marks=pytest.mark.slow)])
def test_it_trains_to_eagers_bits_at_its_least_peak(name: str, solver: str) -> None:
    # The least peak has a schedule whenever a search ends.
    module, plan = planned(CASES[name], "min", solver=solver, time_limit_s=5)
    require_as_eager(CASES[name], module)
    assert simulate(plan.step, plan.schedule).peak_bytes <= plan.budget_bytes


def test_an_op_that_writes_to_a_buffer_is_timed_as_part_of_the_step() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*cannot be timed")
        remat.capture(*made(telemetry), measure_again=True)


def test_regions_of_the_profiler_are_no_ops_of_a_step() -> None:
    step = remat.capture(*made(profiled))
    assert not [op.name for op in step.ops if "record_function" in op.target]


@torch.library.custom_op("reported_models::say", mutates_args=())
def say(x: Tensor) -> None:
    SAID.append(1)


SAID: list[int] = []
say.register_fake(lambda x: None)
torch.fx.node.has_side_effect(torch.ops.reported_models.say.default)


def test_an_op_without_results_runs_once_in_each_step() -> None:
    def case() -> Case:
        def forward(self: Any, x: Tensor) -> Tensor:
            for layer in self.blocks:
                x = x + layer(x)
                say(x.detach())
            return x.square().mean()

        return Computing(forward, blocks=blocks(2)), (tokens(),)

    module, _ = planned(case, "min", solver="dtr", audit=False)
    SAID.clear()
    require_as_eager(case, module)
    assert len(SAID) == 2 * (3 + 3)  # of eager's steps and of the plan's


def recomputed(plan: Any) -> set[str]:
    """The kinds of ops that run more than once, such as ``mul.Tensor``."""
    runs = plan.schedule.computations()
    targets = {op.name: op.target for op in plan.step.ops}
    return {targets[name].removeprefix("aten.") for name, number in runs.items() if number > 1}


def test_dequantised_weights_are_what_is_recomputed_first() -> None:
    _, plan = planned(dequantised, "90%", gap=0.02)
    assert recomputed(plan) == {"_to_copy.default", "mul.Tensor"}
    assert plan.overhead < 0.05


def test_a_part_whose_results_are_detached_is_kept_for_nothing() -> None:
    whole, cut = (
        planned(lambda cut=cut: looped(cut=cut), "100%", solver="store_all")[1]
        for cut in (False, True)
    )
    of_loop = 2 * 2 * 24 * 64 * 4  # bytes of what GELU reads in one loop of two blocks
    assert simulate(cut.step, cut.schedule).peak_bytes < (
        simulate(whole.step, whole.schedule).peak_bytes - 2 * of_loop
    )


@pytest.mark.parametrize("case", [tied_routes, sparse_attention])
def test_a_pinned_choice_runs_once(case: Callable[[], Case]) -> None:
    part = "gates" if case is tied_routes else "indexer"
    _, plan = planned(case, "min", solver="dtr", keep=[f"{part}*"])
    of_part = {op.name for op in plan.step.ops if op.module.startswith(part)}
    runs = plan.schedule.computations()
    assert of_part
    assert all(runs[name] == 1 for name in of_part if name in runs)


def test_attention_over_gathered_blocks_is_not_what_is_recomputed_first() -> None:
    _, plan = planned(sparse_attention, "90%", gap=0.1)
    assert not {target for target in recomputed(plan) if target.startswith(("bmm", "topk"))}


def under_hooks(model: nn.Module, args: tuple[Any, ...]) -> Tensor:
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        loss = model(*args)
    loss.backward()
    with save_on_cpu():
        return one_step(model, args)


def under_a_profiler(model: nn.Module, args: tuple[Any, ...]) -> Tensor:
    with profile():
        return one_step(model, args)


def backward_twice(model: nn.Module, args: tuple[Any, ...]) -> Tensor:
    loss = model(*args)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("step", [under_hooks, under_a_profiler, backward_twice])
def test_a_step_in_other_company_has_eagers_bits(step: Step) -> None:
    """pytorch/pytorch#147565, pytorch/pytorch#196862, ByteDance-Seed/VeOmni#965."""
    module, _ = planned(profiled, "min", solver="dtr")
    require_as_eager(profiled, module, step)


@pytest.mark.parametrize("step", [one_step, pytest.param(backward_twice, marks=pytest.mark.slow)])
def test_copies_to_the_host_have_eagers_bits_at_each_step(step: Step) -> None:
    """pytorch/torchtitan#2581, ByteDance-Seed/VeOmni#965."""
    module, plan = planned(CASES["looped"], "50%", host="1MiB", gap=0.1)
    assert plan.schedule.moves
    require_as_eager(CASES["looped"], module, step)


def loop_over_experts(self: Any, x: Tensor) -> Tensor:
    """huggingface/transformers#47467: a loop over the experts that have a token."""
    x = x.flatten(0, 1)
    mask = functional.one_hot(self.gate(x).topk(2, -1).indices, 4).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for hit in (mask.sum((-1, -2)) > 0).nonzero():
        rows = torch.where(mask[hit[0]])[1]
        out.index_add_(0, rows, self.experts[hit[0]](x[rows]))
    return out.square().mean()


def split_by_counts(self: Any, x: Tensor) -> Tensor:
    """NVIDIA-NeMo/Automodel#3156: how many tokens an expert has decides shapes."""
    x = x.flatten(0, 1)
    chosen = self.gate(x).argmax(-1)
    parts = x[chosen.argsort()].split(torch.bincount(chosen, minlength=4).tolist())
    found = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
    return torch.cat(found).square().mean()


def as_many_as_are_positive(self: Any, x: Tensor) -> Tensor:
    """pytorch/pytorch#144095: sizes that no trace knows."""
    found = self.gate(x)
    return found.masked_select(found > 0).square().mean()


class Compiled(nn.Sequential):
    """pytorch/pytorch#144637: a part that is compiled already."""

    @torch.compile(backend="aot_eager")
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def with_a_compiled_part(self: Any, x: Tensor) -> Tensor:
    return self.compiled(x).square().mean()


REFUSED = {
    loop_over_experts: r"^keep all rows with torch\.where.*test_reported_models\.py:\d+",
    split_by_counts: r"^use torch\.zeros\(n\)\.scatter_add_.*test_reported_models\.py:\d+",
    as_many_as_are_positive: r"^keep all rows with torch\.where.*masked_select",
    with_a_compiled_part: r"^use the function that was wrapped .*\._torchdynamo_orig_callable",
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda one: one.__name__)
def test_the_refusal_begins_with_what_to_do(forward: Callable[..., Tensor]) -> None:
    compiled = Compiled(linear())
    model = Computing(forward, gate=linear(out=4), experts=blocks(4), compiled=compiled)
    with pytest.raises(CaptureError, match=f"(?s){REFUSED[forward]}"):
        remat.capture(model, (tokens(),))


def all_rows(self: Any, x: Tensor) -> Tensor:
    x = x.flatten(0, 1)
    chosen = self.gate(x).topk(2, -1).indices
    counts = torch.zeros(4).scatter_add_(0, chosen.flatten(), torch.ones(chosen.numel()))
    parts = [
        torch.where((chosen == i).any(-1, keepdim=True), expert(x), 0)
        for i, expert in enumerate(self.experts)
    ]
    return torch.stack(parts).sum(0).square().mean() + 0.01 * counts.var()


def test_the_way_out_trains_as_eager() -> None:
    def case() -> Case:
        return Computing(all_rows, gate=linear(out=4), experts=blocks(4)), (tokens(),)

    module, _ = planned(case, "min", solver="dtr")
    require_as_eager(case, module)


def test_a_frozen_reference_keeps_nothing_whether_or_not_gradients_are_on() -> None:
    """huggingface/trl#5900"""
    peaks = [
        simulate(plan.step, plan.schedule).peak_bytes
        for name in ("reference, forgotten", "reference, no_grad")
        for plan in [planned(CASES[name], "100%", solver="store_all")[1]]
    ]
    assert peaks[0] == peaks[1]


def test_updates_in_backward_take_several_batches() -> None:
    """verl-project/verl#1295"""
    model, args = made(lambda: (nn.Sequential(block(), linear(WIDTH)), (tokens(),)))
    eager, optimizer = copy.deepcopy(model), SGD(model.parameters(), lr=0.1)
    module: Any = remat.rematerialize(
        model, args, loss_fn=functional.mse_loss, target=tokens(), budget="100%",
        optimizer_in_backward=optimizer, accumulate=True, verbose=False,
    )  # fmt: skip
    target = torch.zeros_like(args[0])
    with module.no_update():
        module(*args, target=target).backward()
    module(*args, target=target).backward()
    own = SGD(eager.parameters(), lr=0.1)
    for _ in range(2):
        functional.mse_loss(eager(*args), target).backward()
    own.step()
    assert all(map(torch.equal, eager.parameters(), module.parameters()))
