from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import remat
from remat.cluster.apply.split_backward import SplitBackward, split_backward
from remat.graph_capture.errors import RewriteError
from tests.remat.cluster.split_backward.split_models import MODELS, ROWS, WIDTH, Mlp

N_MICROBATCHES = 3


def x_of(i: int, *, trained: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(ROWS, WIDTH, generator=generator).requires_grad_(trained)


def planned(model: nn.Module, *, budget: str = "100%", trained: bool = True) -> nn.Module:
    batch = (x_of(0, trained=trained),)
    return remat.rematerialize(
        model, batch, budget=budget, accumulate=True, check=False, solver="cut"
    )


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def trained(
    model: nn.Module, split: SplitBackward | None = None, *, trained: bool = True, seed: int = 0
) -> list[Tensor | None]:
    """Gradients after some microbatches, of inputs and of weights, and all buffers.

    With `split`, W of each runs at a moment drawn from `seed`, in order, after its I.
    """
    torch.manual_seed(0)
    moments = random.Random(seed)
    waiting: list[Callable[[], None]] = []
    found: list[Tensor | None] = []
    for i in range(N_MICROBATCHES):
        x = x_of(i, trained=trained)
        (model(x) * torch.linspace(-1, 2, WIDTH)).square().sum().backward()
        found.append(x.grad)
        waiting += [split.dw_builder()] if split else []
        while waiting and moments.random() < 0.4:
            waiting.pop(0)()
    for one in waiting:
        one()
    return [*found, *(p.grad for p in model.parameters()), *model.buffers()]


def alike(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return len(one) == len(other) and all(
        a is b if a is None or b is None else torch.equal(a, b) and a.stride() == b.stride()
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", ["100%", "min"])
def test_gradients_are_eagers_whenever_those_of_weights_are_made(name: str, budget: str) -> None:
    eager = made(name)
    model = planned(copy.deepcopy(eager), budget=budget)
    split = split_backward(model)
    expected = trained(eager)
    for seed in range(3):
        model.zero_grad()
        model.load_state_dict(made(name).state_dict())
        assert alike(expected, trained(model, split, seed=seed))


@pytest.mark.parametrize("name", ["mlp", "stack"])
def test_the_first_stage_has_inputs_without_gradients(name: str) -> None:
    eager = made(name)
    model = planned(copy.deepcopy(eager), trained=False)
    split = split_backward(model)
    assert alike(trained(eager, trained=False), trained(model, split, trained=False))


def test_weights_have_no_gradient_before_their_part_runs() -> None:
    model = planned(made("stack"))
    split = split_backward(model)
    model(x_of(0)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    finish = split.dw_builder()
    finish()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(before) == len([p for p in model.parameters() if p.requires_grad])
    finish()  # once
    assert all(map(torch.equal, before, [p.grad for p in model.parameters() if p.requires_grad]))


def test_a_pass_for_inputs_alone_leaves_nothing() -> None:
    """As `PipelineStage` makes one to infer shapes."""
    model, eager = planned(made("mlp")), made("mlp")
    split = split_backward(model)
    x = x_of(0)
    (found,) = torch.autograd.grad(model(x).sum(), [x])
    assert found.shape == x.shape
    split.dw_builder()()
    assert all(p.grad is None for p in model.parameters())
    assert alike(trained(eager), trained(model, split))


def test_hooks_on_parameters_run_with_the_gradients() -> None:
    model, found = planned(made("mlp")), dict[str, Tensor]()
    split = split_backward(model)
    model.up.weight.register_post_accumulate_grad_hook(lambda p: found.update(after=p.grad.clone()))
    model.up.weight.register_hook(lambda g: found.update(given=g.clone()))
    model(x_of(0)).sum().backward()
    assert not found
    split.dw_builder()()
    assert torch.equal(found["given"], found["after"])


def test_a_gradient_becomes_grad_without_a_copy_and_later_ones_are_added_to_it() -> None:
    model = planned(nn.Linear(WIDTH, 400))
    split = split_backward(model)
    x = x_of(0)
    model(x).square().sum().backward()
    finish = split.dw_builder()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        finish()
    names = {event.key for event in seen.key_averages()}
    assert "aten::mm" in names
    assert not {"aten::clone", "aten::copy_"} & names
    first = model.weight.grad
    assert first is not None
    model(x).sum().backward()
    split.dw_builder()()
    assert model.weight.grad is first


def test_backward_runs_as_a_whole_again() -> None:
    model, eager = planned(made("mlp")), made("mlp")
    split_backward(model).together()
    assert alike(trained(eager), trained(model))
    again = split_backward(model)
    model.zero_grad()
    assert alike(trained(made("mlp")), trained(model, again))


def test_a_forward_after_gradients_that_nobody_took_is_refused() -> None:
    model = planned(made("mlp"))
    split_backward(model)
    model(x_of(0)).sum().backward()
    with pytest.raises(RewriteError, match=r"call dw_builder\(\)\(\).*another forward begins"):
        model(x_of(0))


def test_a_tensor_that_changes_between_both_parts_is_refused() -> None:
    model = planned(made("mlp"), trained=False)
    split = split_backward(model)
    model(x_of(0, trained=False)).sum().backward()
    finish = split.dw_builder()
    with torch.no_grad():
        model.down.weight.add_(1)
    with pytest.raises(RewriteError, match="changed in place between its two parts"):
        finish()


def test_ddp_around_it_is_refused(tmp_path: Path) -> None:
    model = planned(made("mlp"))
    split_backward(model)
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapper = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(
            RewriteError, match=r"fully_shard.*DistributedDataParallel would reduce"
        ):
            wrapper(x_of(0))
    finally:
        dist.destroy_process_group()


def refused(model: nn.Module) -> str:
    with pytest.raises(RewriteError) as caught:
        split_backward(model)
    return str(caught.value)


def test_what_is_not_rewritten_is_refused() -> None:
    assert "torch splits the backward of eager modules itself" in refused(Mlp())


def test_a_module_is_split_once() -> None:
    model = planned(made("mlp"))
    split_backward(model)
    assert "is already split" in refused(model)


def test_a_parameter_of_two_blocks_is_refused() -> None:
    first, second = planned(made("mlp")), Mlp()
    second.up.weight = first.up.weight
    both = nn.ModuleDict({"first": first, "second": planned(second)})
    assert "second.up.weight belongs to first and to second" in refused(both)
    assert all(type(one)._remat_split is None for one in both.values())  # nothing was changed


def test_a_parameter_of_a_block_and_of_what_is_outside_is_refused() -> None:
    block = planned(made("mlp"))
    whole = nn.ModuleDict({"block": block, "head": nn.Linear(WIDTH, 4 * WIDTH)})
    whole["head"].weight = block.up.weight
    said = refused(whole)
    assert "head.weight belongs to block and to modules outside the blocks" in said
    assert "Interleaved1F1B" in said


def test_a_plan_that_updates_in_backward_is_refused() -> None:
    model = made("mlp")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step: Any = remat.rematerialize(
        model, (x_of(0),), optimizer_in_backward=sgd, loss_fn=lambda y: y.sum(), budget="100%"
    )
    assert "updates parameters in backward" in refused(step)


def test_a_module_over_a_range_is_refused() -> None:
    model = remat.rematerialize(
        nn.Linear(WIDTH, WIDTH),
        (torch.randn(8, WIDTH),),
        budget="100%",
        check=False,
        solver="cut",
        dynamic={"input": {0: ("rows", 4, 16)}},
    )
    assert "planned for a range of sizes" in refused(model)
